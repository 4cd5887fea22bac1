"""Lets vLLM schedule the next step while this one runs, with drafts of any length: asynchronous scheduling.

vLLM schedules asynchronously where nothing is drafted, and saves what lies between two steps: scheduling, messages
between processes, results. With drafts made on the CPU it does not, because it cannot know them in advance. Here the
scheduler reserves `k_max` places per request, as it does for drafters on the device, and counts on all of them being
accepted (vllm/v1/core/sched/async_scheduler.py). The worker knows better: before a step is run it puts in how many
tokens there really are, and the drafts there really are. The model runner itself stays in its synchronous mode, so
everything else in this package sees a step as if it had been scheduled after the one before.

Two processes take part: the worker (`Overlap`) and the engine core (`scheduler.py`). In engines whose worker lives in
the engine core's process nothing could overlap, and nothing is changed.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from typing import Any

from rollspec.engine.vllm import hooks
from rollspec.engine.vllm.hooks import runner_v1 as v1
from rollspec.engine.vllm.places import masks, resized

logger = logging.getLogger("rollspec")

KEY = "rollspec_overlap"
"""In `additional_config`, next to rollspec's own configuration: this engine overlaps, or should if it can."""

SCHEDULER = "rollspec.engine.vllm.scheduler.OverlapScheduler"

DRAFTED = "_rollspec_drafted"
"""On a `ModelRunnerOutput`: how many drafts each request really had, for vLLM's own statistics."""


def impossible_because(vllm_config: Any) -> str | None:
    """Why this engine is scheduled synchronously, or None if it need not be. Only what was run is allowed."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    if parallel.distributed_executor_backend != "mp":
        return "its worker runs in the engine core's process"
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return f"{name} > 1"
    if vllm_config.scheduler_config.scheduler_cls is not None:
        return "it has a scheduler of its own"
    if vllm_config.kv_transfer_config is not None or getattr(vllm_config, "ec_transfer_config", None) is not None:
        return "its cache is transferred"
    if getattr(model, "enable_return_routed_experts", False):
        return "it returns routed experts"
    if model.is_hybrid or model.is_encoder_decoder:
        return "its model keeps other state than a KV cache"
    return None


def want(args: Any) -> None:
    """Of `EngineArgs` for an engine that speculates: vLLM must not decide, it would refuse or warn."""
    if args.async_scheduling is not False:
        args.additional_config[KEY] = True
    args.async_scheduling = False


def switch_on(vllm_config: Any) -> None:
    """Schedule asynchronously where that is wanted and possible. `vllm_config` is complete, of a synchronous engine."""
    if not on(vllm_config):
        return
    if (reason := impossible_because(vllm_config)) is not None:
        logger.info("rollspec: steps are scheduled one after the other, because %s.", reason)
        del vllm_config.additional_config[KEY]
        return
    vllm_config.scheduler_config.scheduler_cls = SCHEDULER


def on(vllm_config: Any) -> bool:
    """Whether the engine of this (complete) configuration overlaps."""
    return bool((getattr(vllm_config, "additional_config", None) or {}).get(KEY))


def max_concurrent_batches(batches: Any, vllm_config: Any) -> int:
    """Around `VllmConfig.max_concurrent_batches`: the engine core may have a step scheduled while another runs.

    `async_scheduling` itself stays false: vLLM would refuse the configuration, and build another worker.
    """
    return 2 if on(vllm_config) else int(batches(vllm_config))


def post_step(fetch: Any, core: Any, *args: Any, **kwargs: Any) -> None:
    """Around `EngineCore.post_step`, which fetches drafts: the question would wait for the step that runs."""
    if not on(core.vllm_config):
        fetch(core, *args, **kwargs)


# ---- in the worker --------------------------------------------------------------------------------------------------


class Overlap:
    """Stands between the scheduler's guesses and one model runner (vllm/v1/worker/gpu_model_runner.py).

    Install it last: it must be the first to see a step.
    """

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self._execute = v1.ExecuteModel.put(runner, self.execute_model, __name__)
        self._sample = v1.SampleTokens.put(runner, self.sample_tokens, __name__)
        self._take = v1.TakeDrafts.put(runner, self.take_draft_token_ids, __name__)
        self._drafts: dict[str, list[int]] = {}  # of the requests that sampled in the last step
        self._taken: Any = None  # the same, as vLLM has it
        self._places: dict[str, int] = {}  # how many the scheduler reserved in this step
        self._drafted: dict[str, int] = {}  # and how many there are

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the step as it really is."""
        return self._execute(self.settle(scheduler_output), *args, **kwargs)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample, and take the drafts for the next step at once: nobody will ask for them."""
        computed = self.runner.execute_model_state is not None
        output = self._sample(masks(grammar_output, self._places, self._drafted))
        if not computed:
            return output
        # A copy, because vLLM names the requests by the list of its batch, whose rows move when the next step begins.
        taken = self._taken = copy.deepcopy(self._take())
        self._drafts = dict(zip(taken.req_ids, taken.draft_token_ids, strict=True)) if taken is not None else {}
        if self._places:
            hooks.keep(output, DRAFTED, self._drafted)
        return output

    def take_draft_token_ids(self) -> Any:
        """Asked for only to check drafts against grammars, by another process: it gets a copy."""
        return self._taken

    def settle(self, scheduled: Any) -> Any:
        """The step with true token counts and real drafts, as a new `SchedulerOutput`."""
        cached = scheduled.scheduled_cached_reqs
        self._places = {r: len(p) for r, p in scheduled.scheduled_spec_decode_tokens.items()}
        self._drafted = {}
        if not cached.req_ids:
            return scheduled
        computed, said = list(cached.num_computed_tokens), list(cached.num_output_tokens)
        drafts: dict[str, list[int]] = {}
        for i, req_id in enumerate(cached.req_ids):
            # Of what was in flight when this was scheduled, some drafts were rejected since. A request that starts
            # over was not in flight.
            ahead = said[i] - len(self.runner.requests[req_id].output_token_ids)
            if ahead > 0 and req_id not in cached.resumed_req_ids:
                computed[i] -= ahead
                said[i] -= ahead
            if reserved := self._places.get(req_id):
                draft = self._drafts.get(req_id, [])[:reserved]
                self._drafted[req_id] = len(draft)
                if draft:
                    drafts[req_id] = list(draft)
        cached = dataclasses.replace(cached, num_computed_tokens=computed, num_output_tokens=said)
        # Requests that begin have places too where one token of their prompt is left, and no drafts (`places.py`).
        return resized(scheduled, drafts, self._places, self._drafted, scheduled_cached_reqs=cached)
