"""Numbers requests as they reach the scheduler, for coupled sampling: requests need not begin in that order.

vLLM passes over a waiting request whose grammar is still being compiled (in threads, so siblings become ready in any
order), whose KV cache is still on its way, or which has a lower priority (vllm/v1/core/sched/scheduler.py). The number
travels to the worker in `SamplingParams.extra_args`.
"""

from __future__ import annotations

import copy
from typing import Any

from rollspec.engine.noise_keys import SAMPLE_INDEX
from rollspec.engine.vllm import hooks
from rollspec.engine.vllm.settings import engine_config
from rollspec.head import metadata
from rollspec.sampling import scoring
from rollspec.sampling.streams import SampleIndex

ATTRIBUTE = "_rollspec_sample_index"
"""On a scheduler: its `SampleIndex`, None where it counts no requests."""


def add_request(add: Any, scheduler: Any, request: Any) -> None:
    """Around `Scheduler.add_request`; it does nothing in an engine that does not sample coupled."""
    sample_index = vars(scheduler).get(ATTRIBUTE, False)
    if sample_index is False:
        sample_index = _wanted(scheduler.vllm_config)
        hooks.keep(scheduler, ATTRIBUTE, sample_index)
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


def _wanted(vllm_config: Any) -> SampleIndex | None:
    config = engine_config(vllm_config)
    return SampleIndex() if config is not None and config.mode == "coupled" else None
