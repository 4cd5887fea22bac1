"""Coupled sampling on the V2 runner: rollspec's keys become the seeds by which the runner draws.

The runner's noise is a function of (seed, position, token), so a request's seed decides all of its noise. A key of
`NoiseKeys` names the run, the policy version, the prompt and the sample (docs/exactness.md), so a request's text is the
same in any batch and with any drafts. Verification is `verify.Verification`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rollspec.config import RollspecConfig
from rollspec.engine.noise_keys import NoiseKeys
from rollspec.engine.vllm.hooks.runner_v2 import NoFlashInfer


class SeededNoise(NoiseKeys):
    """Gives every request that begins its key as its seed."""

    def __init__(self, runner: Any, config: RollspecConfig, record_fault: Callable[[str], None]) -> None:
        super().__init__(runner, config, record_fault)
        self._slots = runner.req_states.index_to_req_id
        self._seeds = runner.sampler.sampling_states.seeds.np
        self._seeded = runner.sampler.sampling_states.seeds_set
        NoFlashInfer.put(runner.sampler, False, __name__)  # it draws with noise of its own

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
