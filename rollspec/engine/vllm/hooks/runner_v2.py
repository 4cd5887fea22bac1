"""Attributes of one engine's running objects under vLLM's second model runner, and how its speculator is made."""

from __future__ import annotations

from typing import ClassVar

from rollspec.engine.vllm.hooks.base import Hook, RunnerHook

RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
SPEC_DECODE = "vllm.v1.worker.gpu.spec_decode"


class InitSpeculator(Hook):
    """The runner's constructor makes its speculator by the method's name."""

    name = "init_speculator"
    targets = ("vllm.v1.worker.gpu.model_runner:init_speculator",)
    by = ("install",)
    why = "drafts from memory have no speculator of vLLM's"
    removal = "vLLM takes a speculator class by name"


class SecondRunnerHook(RunnerHook):
    """On a second model runner that is ready."""

    by: ClassVar[tuple[str, ...]] = ("install",)


class BeginStep(SecondRunnerHook):
    """A step begins."""

    name = "v2_execute_model"
    targets = (f"{RUNNER}.execute_model",)
    correctness = True
    why = "sees the step, and removes the padded draft slots"
    removal = "vLLM notifies speculators of steps, and takes drafts of different lengths from them"


class SampleStep(SecondRunnerHook):
    """Logits become tokens."""

    name = "v2_sample"
    targets = (f"{RUNNER}.sample",)
    why = "what was sampled and accepted is what the next drafts are made from"
    removal = "vLLM hands sampled tokens to speculators"


class EndStep(SecondRunnerHook):
    """A step's second half."""

    name = "v2_sample_tokens"
    targets = (f"{RUNNER}.sample_tokens",)
    correctness = True
    why = "fits grammar masks to the drafts there are; starts the drafting thread"
    removal = BeginStep.removal


class GiveDrafts(SecondRunnerHook):
    """A scheduler that waits, or that checks drafts against a grammar, asks for them."""

    name = "v2_take_draft_token_ids"
    targets = (f"{RUNNER}.take_draft_token_ids",)
    correctness = True
    why = "answers with each request's draft, of its own length"
    removal = BeginStep.removal


class Propose(SecondRunnerHook):
    """The speculator proposes."""

    name = "v2_propose"
    targets = (f"{SPEC_DECODE}.speculator:BaseSpeculator.propose",)
    by = ("specialists", "layers", "install")
    why = "every request gets the best draft there is, of all heads, too; no head sees the layer for capture"
    removal = "vLLM lets speculators be composed"


class NoFlashInfer(SecondRunnerHook):
    """Requests with top-k or top-p and no seed are drawn by a fused kernel where there is one."""

    name = "v2_use_flashinfer"
    targets = ("vllm.v1.worker.gpu.sample.sampler:Sampler.use_flashinfer",)
    correctness = True
    why = "the fused kernel draws with noise of its own (mode: coupled)"
    removal = "the scheduler gives every request its seed"


class Verify(SecondRunnerHook):
    """Drafts are verified."""

    name = "v2_verify"
    targets = (f"{SPEC_DECODE}.rejection_sampler:RejectionSampler._verify",)
    correctness = True
    why = "accepts what the plain sampler would have drawn (mode: coupled, and requests with a seed)"
    removal = "vLLM verifies by the noise that it samples with"


class GiveSeed(SecondRunnerHook):
    """A request begins, and the sampler draws a seed for it."""

    name = "v2_sampler_add_request"
    targets = ("vllm.v1.worker.gpu.sample.sampler:Sampler.add_request",)
    correctness = True
    why = "its seed is the key of its noise (mode: coupled)"
    removal = "the scheduler gives every request its seed"


class LoadTarget(Hook):
    """The target is loaded, and the layers whose hidden states a head reads are set."""

    name = "v2_load_model"
    targets = (f"{RUNNER}.load_model",)
    by = ("layers",)
    why = "notes which layers the head reads, and has the target give its last layer's states to capture"
    removal = "vLLM gives a speculator the layers that it asks for"


class GiveStates(SecondRunnerHook):
    """Whether the target gives the states of some layers beside its output."""

    name = "v2_use_aux_hidden_state_outputs"
    targets = (f"{RUNNER}.use_aux_hidden_state_outputs",)
    versions = ">=0.32,<0.33"  # the newer one was not run with it
    by = ("layers",)
    why = "a draft model is trained on the target's last states, which vLLM gives to heads alone"
    removal = LoadTarget.removal


class LoadHead(SecondRunnerHook):
    """The speculator loads its head, before the KV cache is laid out."""

    name = "v2_load_draft_model"
    targets = (f"{SPEC_DECODE}.speculator:DraftModelSpeculator.load_draft_model",)
    by = ("specialists",)
    why = "loads further heads after vLLM's own"
    removal = "specialists do"


class MakeHead(SecondRunnerHook):
    """A head's modules are made, and its weights read."""

    name = "v2_eagle_get_model"
    targets = (f"{SPEC_DECODE}.eagle.utils:get_model",)
    by = ("specialists",)
    why = "a further head is read from its own folder, and its layers have names of their own"
    removal = "`load_eagle_model` takes a folder and a prefix"


class HeadModel(SecondRunnerHook):
    """The head that the speculator runs."""

    name = "v2_draft_model"
    targets = (f"{SPEC_DECODE}.speculator:DraftModelSpeculator.model",)
    by = ("specialists",)
    why = "has vLLM's speculator run another head"
    removal = "specialists do"


class ProcessLogits(SecondRunnerHook):
    """Logits become those that are sampled from."""

    name = "v2_apply_sampling_params"
    targets = ("vllm.v1.worker.gpu.sample.sampler:Sampler.apply_sampling_params",)
    why = "reads the target's largest probabilities, and its best tokens where something was drafted"
    removal = "vLLM shows logits to speculators"


class ScorePrompts(SecondRunnerHook):
    """Log-probs of the tokens of prompts."""

    name = "v2_compute_prompt_logprobs"
    targets = ("vllm.v1.worker.gpu.sample.prompt_logprob:PromptLogprobsWorker.compute_prompt_logprobs",)
    correctness = True
    why = "scores old responses at the temperature they are sampled at (reuse.mode = lenient)"
    removal = "vLLM applies the temperature to prompt_logprobs"


class SampleDraft(SecondRunnerHook):
    """A pass of the head becomes a token."""

    name = "v2_sample_draft"
    targets = (f"{SPEC_DECODE}.speculator:DraftModelSpeculator.sample_draft",)
    by = ("speculator_run",)
    why = "records the head's confidence in its token, and draws it with the target's noise where that is asked for"
    removal = "vLLM's speculators return their confidence in every token"


class DraftSteps(SecondRunnerHook):
    """How many passes the speculator of a draft model runs."""

    name = "v2_num_speculative_steps"
    targets = (f"{SPEC_DECODE}.speculator:DraftModelSpeculator.num_speculative_steps",)
    by = ("speculator_run",)
    why = "a draft model runs as many passes as a step asks for"
    removal = "`StandaloneARSpeculator.propose` follows `num_speculative_tokens`"
