"""The scheduler of an engine that overlaps: vLLM's asynchronous one, for drafts whose number only the worker knows.

`overlap.py` says how the two work together. It runs in the engine core's process and is named there by
`SchedulerConfig.scheduler_cls`.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from rollspec.engine.vllm.overlap import DRAFTED

PLACES_SHARE = 0.5
"""Part of a step's token budget that running requests may reserve, places for drafts included; the rest is for prompts.
Large batches get fewer places each, as they get fewer drafts from the tuner."""


class OverlapScheduler(AsyncScheduler):  # type: ignore[misc] # vLLM has no types that mypy sees
    """Schedules a step ahead of the worker, with up to `num_speculative_tokens` places for every request."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step; no places for drafts that a grammar has not seen."""
        for request in self.running:
            # A grammar masks the rows of drafts that it was shown. It is shown them between two steps of a request
            # that overlap (`EngineCore.step_with_batch_queue`), so there are none after a break.
            if request.use_structured_output and request.spec_token_ids and not request.num_output_placeholders:
                request.spec_token_ids = []
        return super().schedule(*args, **kwargs)

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        each = int(PLACES_SHARE * self.max_num_scheduled_tokens) // max(1, len(self.running)) - 1
        scheduler_output.num_spec_tokens_to_schedule = max(0, min(self.num_spec_tokens, each))
        super()._update_after_schedule(scheduler_output)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take a step's result, and how many drafts it really had."""
        drafted = getattr(model_runner_output, DRAFTED, None)
        if drafted is not None:
            scheduler_output.num_invalid_spec_tokens = {
                r: len(places) - drafted.get(r, 0)
                for r, places in scheduler_output.scheduled_spec_decode_tokens.items()
            }
        return super().update_from_output(scheduler_output, model_runner_output)

    def make_spec_decoding_stats(self, spec_decoding_stats: Any, num_draft_tokens: int, **kwargs: Any) -> Any:
        """vLLM's statistics count requests that drafted, not places."""
        invalid = (kwargs["num_invalid_spec_tokens"] or {}).get(kwargs["request_id"], 0)
        if num_draft_tokens and num_draft_tokens == invalid:
            return spec_decoding_stats
        return super().make_spec_decoding_stats(spec_decoding_stats, num_draft_tokens=num_draft_tokens, **kwargs)
