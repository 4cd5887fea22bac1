"""Which noise every running request of an engine is sampled with: `Streams`, kept in step with the scheduler.

vLLM's noise is a function of (seed, position, token), so a request's seed decides all of its noise. It gets its key as
its seed, which names the run, the policy version, the prompt and the sample (docs/exactness.md): its text is the same
in any batch and with any drafts. Verification is v2/verify.py's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from rollspec.config import RollspecConfig
from rollspec.log_once import LogOnce
from rollspec.sampling import scoring
from rollspec.sampling.streams import Streams

logger = logging.getLogger("rollspec")

SAMPLE_INDEX = "sample_index"
"""Of what a request says about itself: how many of its prompt reached the scheduler before it (`SampleIndex`)."""

GREEDY = 1e-5
"""Temperatures below it are greedy (vllm/v1/sample/sampler.py, `_SAMPLING_EPS`)."""


class NoiseKeys:
    """Keys of the running requests, and whether the engine still samples by them.

    Args:
        runner: a model runner of vLLM; its seed and data-parallel rank set replicas apart, which sample siblings of one
            prompt.
        record_fault: called with the cause of a fault. After one the engine samples as it would without keys: from the
            same distribution, with noise that cannot be repeated.
    """

    def __init__(self, runner: Any, config: RollspecConfig, record_fault: Callable[[str], None]) -> None:
        engine = (int(runner.model_config.seed or 0), int(runner.parallel_config.data_parallel_rank))
        self.keep = config.reuse.seeds == "keep"
        self.streams = Streams(config.coupled.seed, engine, keep=self.keep)
        self.on = True
        self._slots = runner.req_states.index_to_req_id
        self._seeds = runner.sampler.sampling_states.seeds.np
        self._record_fault = record_fault
        self._log_once = LogOnce()
        self._broken: Exception | None = None  # what made the noise of the next step unknown
        if self.keep:
            logger.warning(
                "rollspec: noise is kept over epochs (reuse.mode = replay): the rollouts of each policy follow it "
                "exactly, but they are correlated with those of the policies before it, which it was trained on."
            )

    def before_step(self, scheduler_output: Any) -> None:
        """Forget requests that ended, and give those that begin their noise."""
        if not self.on or self._broken is not None:
            return
        try:
            for request in scheduler_output.finished_req_ids:
                self.streams.end(request)
            for new in scheduler_output.scheduled_new_reqs:
                params = new.sampling_params
                seed = params.seed if params is not None else None
                number = scoring.asked(params).get(SAMPLE_INDEX)
                number = number if isinstance(number, int) else None
                origin, turn = scoring.origin(params), scoring.turn(params)
                self.streams.begin(new.req_id, new.prompt_token_ids, seed, number, origin, turn)
        except Exception as e:
            self._broken = e

    def add_request(self, add: Callable[..., None], slot: int, params: Any) -> None:
        """Around `Sampler.add_request` (vllm/v1/worker/gpu/sample/sampler.py): it draws a seed where none is given."""
        add(slot, params)
        if not self.on:
            return
        if self._broken is not None:
            self.fail(self._broken)
            return
        try:
            key = np.uint64(self.streams.keys[self._slots[slot]])
        except Exception as e:
            self.fail(e)
            return
        self._seeds[slot] = key.astype(np.int64)

    def stream(self, request: str, params: Any) -> int | None:
        """The key under which what the request says is found again an epoch later; None where it is not to be reused.

        `params` is its `SamplingParams`, or None.
        """
        if not self.keep or not self.on:
            return None
        if params is not None and params.temperature < GREEDY:
            self._log_once.warn(
                "requests at temperature 0 reuse no old responses, because no noise makes them what they are"
            )
            return None
        if self.streams.repeated(request):
            self._log_once.warn(
                "requests whose seed another one of their group has reuse no old responses; give each its own"
            )
            return None
        return self.streams.keys.get(request)

    def fail(self, error: BaseException) -> None:
        """Coupled sampling is off from now on: record the fault, log it once."""
        if not self.on:
            return
        self.on = False
        cause = f"coupled sampling: {type(error).__name__}: {error}"
        self._record_fault(cause)
        logger.error(
            "rollspec: coupled sampling is off from now on (%s); tokens still follow the policy, by vLLM's own "
            "sampling, but depend on the batch and the drafts.",
            cause,
            exc_info=error,
        )
