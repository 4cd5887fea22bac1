"""Adapts vLLM's asynchronous scheduler to drafts whose number only the worker knows.

It reserves k draft slots for every request; the worker removes the padded ones (`adapter.py`), and the
scheduler sees them as rejected. Two things are left: the slots must not eat the token budget that prompts need, and
vLLM's own statistics count drafts, not slots. For coupled sampling requests are numbered as they reach the scheduler.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from rollspec.engine.noise_keys import SAMPLE_INDEX
from rollspec.engine.vllm import hooks
from rollspec.engine.vllm.compat import engine_config, is_on
from rollspec.head import metadata
from rollspec.sampling import scoring
from rollspec.sampling.streams import SampleIndex

DRAFTED = "_rollspec_drafted"
"""On a `ModelRunnerOutput`: how many drafts each request really had."""

SLOTS_SHARE = 0.5
"""Part of a step's token budget that running requests may reserve, draft slots included; the rest is for prompts. Large
batches get fewer slots each, as they get fewer drafts from the tuner.
"""

NUMBERED = "_rollspec_sample_index"
"""On a scheduler: its `SampleIndex`, None where it counts no requests."""


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


def add_request(add: Any, scheduler: Any, request: Any) -> None:
    """Around `Scheduler.add_request`: numbers requests as they come, in an engine that samples coupled.

    They need not begin in that order. vLLM passes over a waiting request whose grammar is still being compiled (in
    threads, so siblings become ready in any order), whose KV cache is still on its way, or which has a lower priority
    (vllm/v1/core/sched/scheduler.py). The number travels to the worker in `SamplingParams.extra_args`.
    """
    sample_index = vars(scheduler).get(NUMBERED, False)
    if sample_index is False:
        config = engine_config(scheduler.vllm_config)
        sample_index = SampleIndex() if config is not None and config.mode == "coupled" else None
        hooks.keep(scheduler, NUMBERED, sample_index)
    params = request.sampling_params
    # Those with a seed of their own are not counted: they would shift the numbers of the next policy's samples. Nor are
    # later turns of a rollout, which its first one numbers.
    turn = scoring.turn(params)
    if sample_index is not None and params is not None and params.seed is None and not (turn and turn.number):
        # A copy: where the engine runs in the caller's process, requests may share their parameters.
        params = request.sampling_params = copy.copy(params)
        number = sample_index.number(request.prompt_token_ids, scoring.origin(params))
        params.extra_args = metadata.added(params.extra_args, {SAMPLE_INDEX: number})
    add(scheduler, request)
