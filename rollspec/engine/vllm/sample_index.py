"""Numbers requests as they reach the scheduler, for coupled sampling: requests need not begin in that order.

vLLM passes over a waiting request whose grammar is still being compiled (in threads, so siblings become ready in any
order), whose KV cache is still on its way, or which has a lower priority (vllm/v1/core/sched/scheduler.py). The number
travels to the worker in `SamplingParams.extra_args`.
"""

from __future__ import annotations

import copy
from typing import Any

from rollspec.engine.noise_keys import ARRIVAL
from rollspec.engine.vllm import hooks
from rollspec.engine.vllm.settings import engine_config
from rollspec.head import metadata
from rollspec.sampling import scoring
from rollspec.sampling.streams import Arrivals

ARRIVALS = "_rollspec_arrivals"
"""On a scheduler: its `Arrivals`, None where it numbers no requests."""


def add_request(add: Any, scheduler: Any, request: Any) -> None:
    """Around `Scheduler.add_request`; it does nothing in an engine that does not sample coupled."""
    arrivals = vars(scheduler).get(ARRIVALS, False)
    if arrivals is False:
        arrivals = _wanted(scheduler.vllm_config)
        hooks.keep(scheduler, ARRIVALS, arrivals)
    params = request.sampling_params
    # Those with a seed of their own are not counted: they would shift the numbers of the next policy's samples. Nor are
    # later turns of a rollout, which its first one numbers.
    turn = scoring.turn(params)
    if arrivals is not None and params is not None and params.seed is None and not (turn and turn.number):
        # A copy: where the engine runs in the caller's process, requests may share their parameters.
        params = request.sampling_params = copy.copy(params)
        number = arrivals.number(request.prompt_token_ids, scoring.origin(params))
        params.extra_args = metadata.added(params.extra_args, {ARRIVAL: number})
    add(scheduler, request)


def _wanted(vllm_config: Any) -> Arrivals | None:
    config = engine_config(vllm_config)
    return Arrivals() if config is not None and config.mode == "coupled" else None
