"""What rollspec wraps, replaces or adds to in vLLM beside the patches of its faults, in the order in which it does.

The comment beside a name says what vLLM does there.
"""

from __future__ import annotations

from rollspec.engine.vllm.hooks.base import ANY, Hook, RunnerHook

RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
SPEC_DECODE = "vllm.v1.worker.gpu.spec_decode"

# In every process that loads vLLM's plugins; without effect in engines that rollspec is not on in.

# Where every engine begins, whatever builds it: settings are read and speculation is switched on.
CreateEngineConfig = Hook(
    "create_engine_config",
    "vllm.engine.arg_utils:EngineArgs.create_engine_config",
    versions=ANY,
    by=("plugin",),
    why="switches speculation on, or says in one sentence why an engine is left alone",
    removal="vLLM lets a plugin complete EngineArgs",
)
# The first call in a worker after plugins are loaded; the model runner is made in it, the model after it.
InitDevice = Hook(
    "init_device",
    "vllm.v1.worker.worker_base:WorkerWrapperBase.init_device",
    correctness=True,
    by=("plugin",),
    why="installs the patches before the model is loaded and its weights are packed",
    removal="vLLM calls plugins in a worker with its configuration",
)
InitializeFromConfig = Hook(  # the last call before the first step: model and KV cache are there
    "initialize_from_config",
    "vllm.v1.worker.worker_base:WorkerWrapperBase.initialize_from_config",
    by=("plugin",),
    why="attaches rollspec to the model runner",
    removal="vLLM calls plugins in a worker that is ready",
)
WorkerCall = Hook(  # a method of ours that trainers reach by `collective_rpc("rollspec", ...)`
    "worker_call",
    "vllm.v1.worker.worker_base:WorkerBase.rollspec",
    adds=True,
    versions=ANY,
    by=("plugin",),
    why="adds the method that trainers call; it answers in engines without rollspec too",
    removal="vLLM lets a plugin add worker methods without worker_extension_cls, which trainers use themselves",
)
AddRequest = Hook(  # where requests still come in the order in which they were submitted
    "add_request",
    "vllm.v1.core.sched.scheduler:Scheduler.add_request",
    correctness=True,
    by=("scheduling",),
    why="numbers requests in the order they arrive, which names the noise of coupled sampling",
    removal="coupled sampling draws from the engine's own seeded noise",
)
OutputHandler = Hook(  # the first call in a server's process for which there is an event loop
    "run_output_handler",
    "vllm.v1.engine.async_llm:AsyncLLM._run_output_handler",
    by=("prometheus",),
    why="starts the task that brings rollspec's metrics to a server's /metrics",
    removal="vLLM lets a plugin add metrics of the workers to /metrics",
)
ReserveSlots = Hook(  # the asynchronous scheduler reserves the draft slots of the next step
    "update_after_schedule",
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule",
    by=("scheduling",),
    why="keeps slots for drafts that may not come from eating the token budget that prompts need",
    removal="vLLM reserves slots by what drafters say they will use",
)
UpdateFromOutput = Hook(  # a step's result reaches the scheduler
    "update_from_output",
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
    by=("scheduling",),
    why="says how many of the reserved slots had a draft, for vLLM's own statistics",
    removal="the model runner's output says how many drafts were verified",
)
DraftStatistics = Hook(  # vLLM counts a request's drafts
    "make_spec_decoding_stats",
    "vllm.v1.core.sched.scheduler:Scheduler.make_spec_decoding_stats",
    by=("scheduling",),
    why="leaves out requests whose slots had no draft",
    removal=UpdateFromOutput.removal,
)

# In a worker, before its model runner is made.

InitSpeculator = Hook(  # the runner's constructor makes its speculator by the method's name
    "init_speculator",
    "vllm.v1.worker.gpu.model_runner:init_speculator",
    by=("install",),
    why="model-free drafts have no speculator of vLLM's",
    removal="vLLM takes a speculator class by name",
)
LookAtAttention = Hook(  # the runner knows its attention kernels, and plans its CUDA graphs
    "v2_adaptive_verification",
    "vllm.v1.worker.gpu.model_runner:maybe_create_adaptive_verification_manager",
    by=("graphs",),
    why="finds out whether its attention kernels replay graphs for drafts of different lengths",
    removal="vLLM captures such graphs for any speculator that asks for them",
)
MakeGraphs = Hook(
    "v2_cudagraph_manager",
    "vllm.v1.worker.gpu.model_runner:ModelCudaGraphManager",
    by=("graphs",),
    why="captures full CUDA graphs for drafts of different lengths, as vLLM does for adaptive verification",
    removal=LookAtAttention.removal,
)
LoadTarget = Hook(  # the target is loaded, and the layers whose hidden states a head reads are set
    "v2_load_model",
    f"{RUNNER}.load_model",
    by=("layers",),
    why="notes which layers the head reads, and has the target give its last layer's states to capture",
    removal="vLLM gives a speculator the layers that it asks for",
)
GiveStates = RunnerHook(  # whether the target gives the states of some layers beside its output
    "v2_use_aux_hidden_state_outputs",
    f"{RUNNER}.use_aux_hidden_state_outputs",
    versions=">=0.32,<0.33",  # the newer one was not run with it
    by=("layers",),
    why="a draft model is trained on the target's last states, which vLLM gives to heads alone",
    removal=LoadTarget.removal,
)

# When the model is loaded, where there are specialists.

LoadHead = RunnerHook(  # the speculator loads its head, before the KV cache is laid out
    "v2_load_draft_model",
    f"{SPEC_DECODE}.speculator:DraftModelSpeculator.load_draft_model",
    by=("specialists",),
    why="loads further heads after vLLM's own",
    removal="specialists do",
)
MakeHead = RunnerHook(  # a head's modules are made, and its weights read
    "v2_eagle_get_model",
    f"{SPEC_DECODE}.eagle.utils:get_model",
    by=("specialists",),
    why="a further head is read from its own folder, and its layers have names of their own",
    removal="`load_eagle_model` takes a folder and a prefix",
)
HeadModel = RunnerHook(  # the head that the speculator runs
    "v2_draft_model",
    f"{SPEC_DECODE}.speculator:DraftModelSpeculator.model",
    by=("specialists",),
    why="has vLLM's speculator run another head",
    removal="specialists do",
)

# On a model, a worker and a model runner that are ready, in this order; the last one is the first to see a step.

LoadWeights = RunnerHook(  # weights from a trainer reach the model here
    "load_weights",
    "vllm.model_executor.models.qwen3:Qwen3ForCausalLM.load_weights",
    why="counts policy versions for programs that do not set them; on the instance, whatever the model's class",
    removal="vLLM numbers the weights it was given",
)
PackedLinear = RunnerHook(  # vLLM-CPU packs a linear layer's weight into a closure
    "cpu_linear",
    "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
    attribute="cpu_linear",
    cpu_only=True,
    by=("draft_weights",),
    why="exchanges the packed weights of a head and of its second copy, between two steps",
    removal="the swap uses vLLM's own calls for draft weights",
)
WorkerSleep = RunnerHook(  # the engine goes to sleep: its memory is released
    "worker_sleep",
    "vllm.v1.worker.gpu_worker:Worker.sleep",
    why="waits for readers of the target's weights, and stops training and swaps",
    removal="vLLM notifies plugins of sleep",
)
WorkerWakeUp = RunnerHook(  # the engine wakes up: its memory is back, with unknown contents
    "worker_wake_up",
    "vllm.v1.worker.gpu_worker:Worker.wake_up",
    why="verifies the head's weights before the next step",
    removal="vLLM notifies plugins of sleep",
)
BeginStep = RunnerHook(  # a step begins
    "v2_execute_model",
    f"{RUNNER}.execute_model",
    correctness=True,
    why="sees the step, and removes the padded draft slots",
    removal="vLLM notifies speculators of steps, and takes drafts of different lengths from them",
)
EndStep = RunnerHook(  # a step's second half
    "v2_sample_tokens",
    f"{RUNNER}.sample_tokens",
    correctness=True,
    why="fits grammar masks to the drafts there are; starts the drafting thread",
    removal=BeginStep.removal,
)
GiveDrafts = RunnerHook(  # a scheduler that waits, or that checks drafts against a grammar, asks for them
    "v2_take_draft_token_ids",
    f"{RUNNER}.take_draft_token_ids",
    correctness=True,
    why="answers with each request's draft, of its own length",
    removal=BeginStep.removal,
)
SampleStep = RunnerHook(  # logits become tokens
    "v2_sample",
    f"{RUNNER}.sample",
    why="what was sampled and accepted is what the next drafts are made from",
    removal="vLLM hands sampled tokens to speculators",
)
Propose = RunnerHook(  # the speculator proposes
    "v2_propose",
    f"{SPEC_DECODE}.speculator:BaseSpeculator.propose",
    by=("specialists", "layers", "install"),
    why="every request gets the best draft there is, of all heads, too; no head sees the layer for capture",
    removal="vLLM lets speculators be composed",
)
GiveSeed = RunnerHook(  # a request begins, and the sampler draws a seed for it
    "v2_sampler_add_request",
    "vllm.v1.worker.gpu.sample.sampler:Sampler.add_request",
    correctness=True,
    why="its seed is the key of its noise (mode: coupled)",
    removal="the scheduler gives every request its seed",
)
# Requests with top-k or top-p and no seed are drawn by a fused kernel where there is one.
NoFlashInfer = RunnerHook(
    "v2_use_flashinfer",
    "vllm.v1.worker.gpu.sample.sampler:Sampler.use_flashinfer",
    correctness=True,
    why="the fused kernel draws with noise of its own (mode: coupled)",
    removal="the scheduler gives every request its seed",
)
Verify = RunnerHook(  # drafts are verified
    "v2_verify",
    f"{SPEC_DECODE}.rejection_sampler:RejectionSampler._verify",
    correctness=True,
    why="accepts what the plain sampler would have drawn (mode: coupled, and requests with a seed)",
    removal="vLLM verifies by the noise that it samples with",
)
ProcessLogits = RunnerHook(  # logits become those that are sampled from
    "v2_apply_sampling_params",
    "vllm.v1.worker.gpu.sample.sampler:Sampler.apply_sampling_params",
    why="reads the target's largest probabilities, and its best tokens where something was drafted",
    removal="vLLM shows logits to speculators",
)
ScorePrompts = RunnerHook(  # log-probs of the tokens of prompts
    "v2_compute_prompt_logprobs",
    "vllm.v1.worker.gpu.sample.prompt_logprob:PromptLogprobsWorker.compute_prompt_logprobs",
    correctness=True,
    why="scores old responses at the temperature they are sampled at (reuse.mode = lenient)",
    removal="vLLM applies the temperature to prompt_logprobs",
)
SampleDraft = RunnerHook(  # a pass of the head becomes a token
    "v2_sample_draft",
    f"{SPEC_DECODE}.speculator:DraftModelSpeculator.sample_draft",
    by=("speculator_run",),
    why="records the head's confidence in its token, and draws it with the target's noise where that is asked for",
    removal="vLLM's speculators return their confidence in every token",
)
DraftSteps = RunnerHook(  # how many passes the speculator of a draft model runs
    "v2_num_speculative_steps",
    f"{SPEC_DECODE}.speculator:DraftModelSpeculator.num_speculative_steps",
    by=("speculator_run",),
    why="a draft model runs as many passes as a step asks for",
    removal="`StandaloneARSpeculator.propose` follows `num_speculative_tokens`",
)
