"""Draft lengths solved from what steps cost and from an acceptance rate: SmartSpec and ReSpec.

Both take the arm with the largest goodput, B · (1 - θ^(K+1))/(1 - θ) / T(B, K) (Leviathan et al. 2023, eq. 1), where
T(B, K) is what a step of B requests takes with drafts of K tokens each and θ the chance that a draft token is accepted.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rollspec.tuning.bandits import Bandit, acceptance, expected
from rollspec.tuning.strategy import Learner, Outcome, Vector, register

REPEATS = 3  # steps by which ReSpec profiles each arm at a batch bucket
KEEP = 0.5  # what ReSpec keeps of its acceptance statistics when the policy's or the drafter's weights move

UPDATE_EVERY, MOVING, FIRST_RATE, NONE_COUNTS = 20, 0.15, 0.7, 1.1
"""Of SmartSpec's code: steps between two solutions, weight of the newest acceptance rate, the rate before any was seen,
and how much the goodput of no speculation is raised, for what speculation costs besides.
"""


def solve(seconds: Vector, theta: Vector, ks: Vector) -> int:
    """The arm with the largest goodput, from T(B, K), acceptance rates and draft lengths. Shapes [arms]."""
    return int((expected(theta, ks) / seconds).argmax())


class _Profiled(Bandit):
    """What both read from a step: how many draft tokens were accepted under which arm."""

    def _accepted(self, outcome: Outcome) -> Iterator[tuple[int, float]]:
        """(arm, accepted tokens per request): of the played arm; where that is none, of each set's longest.

        While nothing is verified drafts are scored against what the target emits, and an arm that was left for none
        would never be known again without that.
        """
        longest = {int(g): i for i, g in enumerate(self._group) if self._ks[i]}.values()
        for i in [outcome.played] if self._ks[outcome.played] else longest:
            yield i, float(outcome.emitted[i]) / outcome.batch - 1.0


@register("smartspec")
class SmartSpec(_Profiled):
    """SmartSpec (Liu et al., arXiv:2406.14066), as its code is published in ZhaoxuanWu/Tetris (`dsd.py`).

    In every 20th step, the K of the largest goodput, no speculation counting 1.1 times; θ is a moving average,
    0.85 θ + 0.15 (that of the last step), from 0.7 on.
    Simplified: T is the fitted cost model, not a linear model of a profile made beforehand; θ and the 20 steps are of
    one batch bucket; a step's θ is the one at which its mean accepted length is expected.
    """

    def _new(self) -> Learner:
        n = len(self.arms)
        return {"rates": np.full(n, FIRST_RATE), "seconds": np.zeros(n), "steps": np.zeros(1), "best": np.zeros(1)}

    def choose(self, bucket: int) -> int:  # noqa: D102
        b = self._buckets[bucket]
        if not b["seconds"].all():
            return int(self._ks.argmax())
        if b["steps"][0] % UPDATE_EVERY == 1:
            seconds = b["seconds"] / np.where(self._ks == 0, NONE_COUNTS, 1.0)
            b["best"][0] = solve(seconds, b["rates"][self._group], self._ks)
        return int(b["best"][0])

    def observe(self, bucket: int, outcome: Outcome) -> None:  # noqa: D102
        b = self._buckets[bucket]
        b["steps"] += 1
        b["seconds"] = outcome.seconds.astype(float)
        for i, mean in self._accepted(outcome):
            g = self._group[i]
            b["rates"][g] += MOVING * (acceptance(mean, float(self._ks[i])) - b["rates"][g])


@register("respec")
class ReSpec(_Profiled):
    """ReSpec's adaptive configuration (Chen et al., arXiv:2510.26475): a table {batch size: K} from a profile.

    At a batch bucket that is new, every arm is played `REPEATS` times: the least of the measured seconds is the profile
    T(B, K), as the first step of a kind may compile something; the accepted tokens give θ. `solve` makes the table's
    entry, which stands until the policy's or the drafter's weights move; then the whole table is solved again.
    Simplified: the text read for this was the paper's abstract, without the solver's formula, so that is goodput, and
    the decay is ours. It profiles before the job, here the first steps do.
    """

    measures = True

    def _new(self) -> Learner:
        names = ("plays", "seconds", "rates", "weights")
        return {**{n: np.zeros(len(self.arms)) for n in names}, "solved": np.zeros(1), "best": np.zeros(1)}

    def choose(self, bucket: int) -> int:  # noqa: D102
        b = self._buckets[bucket]
        return int(b["best"][0] if b["solved"][0] else b["plays"].argmin())

    def observe(self, bucket: int, outcome: Outcome) -> None:  # noqa: D102
        b = self._buckets[bucket]
        at, least = outcome.played, b["seconds"]
        least[at] = min(outcome.elapsed, least[at]) if b["plays"][at] else outcome.elapsed
        b["plays"][at] += 1
        for i, mean in self._accepted(outcome):
            b["rates"][i] += outcome.batch * acceptance(mean, float(self._ks[i]))
            b["weights"][i] += outcome.batch
        if not b["solved"][0] and b["plays"].min() >= REPEATS:
            self._solve(bucket)

    def changed(self) -> None:  # noqa: D102
        for bucket, b in self._buckets.items():
            if b["solved"][0]:
                self._solve(bucket)
            b["rates"], b["weights"] = KEEP * b["rates"], KEEP * b["weights"]

    def theta(self, bucket: int) -> Vector:
        """Acceptance rate of each arm's drafters. Shape [arms]."""
        b = self._buckets[bucket]
        rates, weights = (np.bincount(self._group, b[n], len(self.arms)) for n in ("rates", "weights"))
        theta: Vector = (rates / np.maximum(weights, 1e-9))[self._group]
        return theta

    def _solve(self, bucket: int) -> None:
        b = self._buckets[bucket]
        b["best"][0], b["solved"][0] = solve(b["seconds"], self.theta(bucket), self._ks), 1.0
