"""Adapts vLLM's asynchronous scheduler to drafts whose number only the worker knows.

It reserves k draft slots for every request; the worker removes the padded ones (`adapter.py`), and the
scheduler sees them as rejected. Two things are left: the slots must not eat the token budget that prompts need, and
vLLM's own statistics count drafts, not slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollspec.engine.vllm.settings import is_on

DRAFTED = "_rollspec_drafted"
"""On a `ModelRunnerOutput`: how many drafts each request really had."""

SLOTS_SHARE = 0.5
"""Part of a step's token budget that running requests may reserve, draft slots included; the rest is for prompts. Large
batches get fewer slots each, as they get fewer drafts from the tuner.
"""


def limit_slots(update: Callable[..., None], scheduler: Any, scheduler_output: Any) -> None:
    """Around `AsyncScheduler._update_after_schedule`, which reserves the slots of the next step."""
    if not is_on(scheduler.vllm_config):
        update(scheduler, scheduler_output)
        return
    each = int(SLOTS_SHARE * scheduler.max_num_scheduled_tokens) // max(1, len(scheduler.running)) - 1
    most = min(scheduler_output.num_spec_tokens_to_schedule, each)
    scheduler_output.num_spec_tokens_to_schedule = max(0, most)
    update(scheduler, scheduler_output)


def count_drafts(update: Callable[..., Any], scheduler: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
    """Around `Scheduler.update_from_output`: slots without a draft count as invalid, which statistics leave out."""
    drafted = getattr(model_runner_output, DRAFTED, None)
    if drafted is not None:
        scheduler_output.num_invalid_spec_tokens = {
            r: len(slots) - drafted.get(r, 0) for r, slots in scheduler_output.scheduled_spec_decode_tokens.items()
        }
    return update(scheduler, scheduler_output, model_runner_output)


def leave_out_empty(make: Callable[..., Any], scheduler: Any, stats: Any, num_draft_tokens: int, **kwargs: Any) -> Any:
    """Around `Scheduler.make_spec_decoding_stats`: a request without a draft did not draft."""
    if not is_on(scheduler.vllm_config):
        return make(scheduler, stats, num_draft_tokens=num_draft_tokens, **kwargs)
    invalid = (kwargs["num_invalid_spec_tokens"] or {}).get(kwargs["request_id"], 0)
    if num_draft_tokens and num_draft_tokens == invalid:
        return stats
    return make(scheduler, stats, num_draft_tokens=num_draft_tokens, **kwargs)
