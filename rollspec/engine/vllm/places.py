"""Places for drafts that the scheduler reserved and that nobody drafted for.

vLLM schedules a request of which one token is left to compute (its prompt is cached but for the last one) with K places
for drafts where it joins requests that decode, so that all rows have one length (vllm/v1/core/sched/scheduler.py). The
drafts are -1. Taken for tokens, they change what is sampled: a worker that puts in other drafts would compute whatever
its row held before, and the rejection kernel for CPUs has no rule for negative drafts. Nothing is gained by them where
drafts have any length, so such places are left out before the step is run; the scheduler sees them as rejected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from rollspec.engine.vllm.hooks import runner_v1 as v1


class Unpadded:
    """Around a model runner (vllm/v1/worker/gpu_model_runner.py) whose steps are scheduled one after the other.

    Install it last: it must be the first to see a step.
    """

    def __init__(self, runner: Any) -> None:
        self._execute = v1.ExecuteModel.put(runner, self.execute_model, __name__)
        self._sample = v1.SampleTokens.put(runner, self.sample_tokens, __name__)
        self._places: dict[str, int] = {}  # by request, in a step where nobody drafted for some
        self._drafted: dict[str, int] = {}

    def execute_model(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the step without such places."""
        places = scheduled.scheduled_spec_decode_tokens
        self._places = {}
        if any(p[-1] < 0 for p in places.values() if p):
            self._places = {r: len(p) for r, p in places.items()}
            drafts = {r: [t for t in p if t >= 0] for r, p in places.items()}  # -1 only ever ends a draft
            self._drafted = {r: len(d) for r, d in drafts.items()}
            scheduled = resized(scheduled, {r: d for r, d in drafts.items() if d}, self._places, self._drafted)
        return self._execute(scheduled, *args, **kwargs)

    def sample_tokens(self, grammar: Any) -> Any:
        """Sample from the rows that are left."""
        return self._sample(masks(grammar, self._places, self._drafted))


def resized(
    scheduled: Any, drafts: dict[str, list[int]], places: Mapping[str, int], drafted: Mapping[str, int], **more: Any
) -> Any:
    """A new `SchedulerOutput` with these drafts in the place of those scheduled.

    Args:
        places: how many were reserved, by request; drafted: how many of them are used. more: other fields to replace.
    """
    counts = dict(scheduled.num_scheduled_tokens)
    for request, n in places.items():
        counts[request] -= n - drafted.get(request, 0)
    return dataclasses.replace(
        scheduled,
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        scheduled_spec_decode_tokens=drafts,
        **more,
    )


def masks(grammar: Any, places: Mapping[str, int], drafted: Mapping[str, int]) -> Any:
    """A `GrammarOutput`'s masks for the rows there are: it has one for each place reserved, and one more."""
    if grammar is None or not places:
        return grammar
    rows: list[int] = []
    at = 0
    for request in grammar.structured_output_request_ids:
        rows.extend(range(at, at + 1 + drafted.get(request, 0)))
        at += 1 + places.get(request, 0)
    return dataclasses.replace(grammar, grammar_bitmask=grammar.grammar_bitmask[np.array(rows, dtype=np.int64)])
