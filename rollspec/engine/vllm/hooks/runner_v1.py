"""Attributes of one engine's running objects under vLLM's first model runner. All of them go with that runner.

`by` lists who wraps, innermost first: `put` refuses another order.
"""

from __future__ import annotations

from typing import Any, ClassVar

from rollspec.engine.vllm.hooks.base import Runner, RunnerHook

RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
DRAFTER = "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer"
WITH_V1 = "with the first model runner"


class DrafterLimit(RunnerHook):
    """vLLM drafts K zeros for the whole batch once a request is within K tokens of this limit."""

    name = "effective_drafter_max_model_len"
    targets = (f"{RUNNER}.effective_drafter_max_model_len",)
    by = ("proposer",)
    why = "drafts on for a batch in which one request nears the context limit; rollspec stops for that one by itself"
    removal = WITH_V1


class Sample(RunnerHook):
    """Where logits become tokens, with and without drafts."""

    name = "sample"
    targets = (f"{RUNNER}._sample",)
    by = ("coupled", "ceiling", "learned", "worker")
    correctness = True
    why = (
        "coupled verification; the largest probabilities and the target's best tokens are read before the logits are "
        "written to; steps without drafts go to the plain sampler, because vLLM 0.32 sends them through the rejection "
        "sampler, which fails on CPU for requests with top_k alone"
    )
    removal = WITH_V1


class DrawTokens(RunnerHook):
    """The draw itself; vLLM chooses this method per platform by assigning it."""

    name = "draw_tokens"
    targets = (
        "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler.forward",
        "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler.forward_native",
    )
    by = ("coupled",)
    correctness = True
    why = "draws with coupled noise in steps without drafts"
    removal = f"{WITH_V1}; the second one's noise is seeded by position"


class PromptLogprobs(RunnerHook):
    """Log-probs of the tokens of a prompt."""

    name = "prompt_logprobs"
    targets = (f"{RUNNER}._get_prompt_logprobs_dict",)
    by = ("scoring",)
    correctness = True
    why = "scores old responses at the temperature they are sampled at (reuse.mode = lenient)"
    removal = "vLLM applies the temperature to prompt_logprobs"


class PromptsToScore(RunnerHook):
    """The requests that `PromptLogprobs` loops over; a group of one temperature at a time."""

    name = "num_prompt_logprobs"
    targets = (f"{RUNNER}.num_prompt_logprobs",)
    by = ("scoring",)
    correctness = True
    why = "scores requests of one temperature at a time"
    removal = PromptLogprobs.removal


class ComputeLogprobs(RunnerHook):
    """Log-probs of logits, as `PromptLogprobs` asks for them."""

    name = "compute_logprobs"
    targets = ("vllm.v1.sample.sampler:Sampler.compute_logprobs",)
    by = ("scoring",)
    correctness = True
    why = "divides a prompt's logits by the request's temperature"
    removal = PromptLogprobs.removal


class LoadWeights(RunnerHook):
    """Weights from a trainer reach the model here."""

    name = "load_weights"
    targets = ("vllm.model_executor.models.qwen3:Qwen3ForCausalLM.load_weights",)
    runner: ClassVar[Runner] = "both"
    by = ("policy",)
    why = "counts policy versions for programs that do not tell them; on the instance, whatever the model's class"
    removal = "vLLM numbers the weights it was given"


class ExecuteModel(RunnerHook):
    """A step begins."""

    name = "execute_model"
    targets = (f"{RUNNER}.execute_model",)
    by = ("worker", "overlap", "places")
    correctness = True
    why = "sees the step, with real drafts in place of reserved ones and without padded slots"
    removal = WITH_V1


class SampleTokens(RunnerHook):
    """A step's second half."""

    name = "sample_tokens"
    targets = (f"{RUNNER}.sample_tokens",)
    by = ("overlap", "places")
    correctness = True
    why = "takes the drafts at the end of a step that overlaps; fits grammar masks to the drafts there are"
    removal = WITH_V1


class ProposeDrafts(RunnerHook):
    """vLLM's own drafter runs in it."""

    name = "propose_draft_token_ids"
    targets = (f"{RUNNER}.propose_draft_token_ids",)
    by = ("learned", "worker")
    why = "runs the head when somebody wants it, for as many passes as are worth it; not at all after a failed start"
    removal = WITH_V1


class TakeDrafts(RunnerHook):
    """The engine core asks for the drafts."""

    name = "take_draft_token_ids"
    targets = (f"{RUNNER}.take_draft_token_ids",)
    by = ("learned", "overlap")
    correctness = True
    why = "answers with each request's draft, whoever made it; the drafts of a step that overlaps are copies"
    removal = WITH_V1


class GreedySample(RunnerHook):
    """A pass of the head becomes a token."""

    name = "greedy_sample"
    targets = (f"{DRAFTER}._greedy_sample",)
    by = ("learned",)
    why = "notes how sure the head is of its token, and draws it with coupled noise where that is asked for"
    removal = WITH_V1


class PackedLinear(RunnerHook):
    """vLLM-CPU packs a linear layer's weight into a closure."""

    name = "cpu_linear"
    targets = ("vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",)
    by = ("weights",)
    cpu_only = True
    why = "exchanges the packed weights of a head and of its second copy, between two steps"
    removal = "the swap uses vLLM's own calls for draft weights"

    @classmethod
    def exchange(cls, layer: Any, other: Any) -> None:
        """The packed weights of two layers change places."""
        layer.cpu_linear, other.cpu_linear = other.cpu_linear, layer.cpu_linear


class WorkerSleep(RunnerHook):
    """The engine's memory is taken away."""

    name = "worker_sleep"
    targets = ("vllm.v1.worker.gpu_worker:Worker.sleep",)
    by = ("worker",)
    why = "waits for whoever reads the target's weights, and stops training and swaps"
    removal = "vLLM tells plugins of sleep"


class WorkerWakeUp(RunnerHook):
    """The engine's memory is back, and of unknown contents."""

    name = "worker_wake_up"
    targets = ("vllm.v1.worker.gpu_worker:Worker.wake_up",)
    by = ("worker",)
    why = "verifies the head's weights before the next step"
    removal = "vLLM tells plugins of sleep"
