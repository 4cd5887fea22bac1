"""How far from optimal: what other settings would have taken for the same tokens, replayed through the cost model.

Each arm's rate per batch bucket gives the time it would have taken for the tokens that were really emitted there:

    fixed/<arm>    one arm for everything; `fixed/none` is no speculation
    oracle         the best arm of each bucket, known in hindsight
    clairvoyant    the best arm of each step, knowing what will be accepted: no policy can reach it
    perfect        a drafter that is always right, at the best K for each bucket
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollspec.tuning.cost import CostModel
from rollspec.tuning.policy import Arm, Outcome, Vector


@dataclass(slots=True)
class _Sums:
    emitted: Vector
    seconds: Vector
    played: Vector = field(default_factory=lambda: np.zeros(2))  # tokens, seconds
    seen: Vector = field(default_factory=lambda: np.zeros(2))  # of the best arm per step
    perfect: float = 0.0


class Ledger:
    """Sums since the last `close`. Seconds are the cost model's, for the played arm too, so that they compare."""

    def __init__(self, arms: Sequence[Arm]) -> None:
        self._arms = arms
        self._sums: dict[int, _Sums] = {}

    def add(self, bucket: int, outcome: Outcome, context_tokens: float, cost: CostModel, steps: int = 1) -> None:
        """One step, which stands for `steps`."""
        s = self._sums.get(bucket)
        if s is None:
            s = self._sums[bucket] = _Sums(np.zeros(len(self._arms)), np.zeros(len(self._arms)))
        s.emitted += steps * outcome.emitted
        s.seconds += steps * outcome.seconds
        p, best = outcome.played, int((outcome.emitted / outcome.seconds).argmax())
        tokens = steps * float(outcome.emitted[p])
        s.played += (tokens, steps * outcome.seconds[p])
        s.seen += (steps * outcome.emitted[best], steps * outcome.seconds[best])
        batch, most = outcome.batch, max(a.k for a in self._arms)
        curve = cost.curve(batch, batch * most, context_tokens)[::batch]
        s.perfect += tokens * float((curve / (batch * np.arange(1.0, most + 2.0))).min())

    def totals(self) -> dict[int, tuple[list[float], list[float]]]:
        """By batch bucket: tokens and modelled seconds under each arm since the last call of `close`."""
        return {b: (s.emitted.tolist(), s.seconds.tolist()) for b, s in self._sums.items()}

    def close(self) -> dict[str, Any]:
        """Modelled seconds for the tokens emitted since the last call, by setting; empty if nothing was."""
        if not self._sums:
            return {}
        fixed = np.zeros(len(self._arms))
        oracle = clairvoyant = perfect = played = 0.0
        for s in self._sums.values():
            times = s.played[0] * s.seconds / s.emitted
            fixed += times
            oracle += float(times.min())
            clairvoyant += s.played[0] * s.seen[1] / s.seen[0]
            perfect += s.perfect
            played += float(s.played[1])
        self._sums = {}
        out = {"played": played, "oracle": oracle, "clairvoyant": float(clairvoyant), "perfect": perfect}
        out |= {f"fixed/{arm.name}": float(t) for arm, t in zip(self._arms, fixed, strict=True)}
        return out
