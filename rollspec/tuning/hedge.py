"""The default policy: discounted full-information Hedge over what each arm would have given.

A verified chain shows what every arm would have emitted, so nothing has to be explored: per batch bucket, discounted
sums E_a (tokens) and S_a (seconds) are kept for all arms. With ρ = max_a E_a/S_a, an arm's loss ρ·S_a - E_a is the
number of tokens that it lost against the best ratio of sums, which maximises tokens per second in the long run (the
best mean of ratios does not).

Weights are exp(-η·loss) with AdaHedge's learning rate, η = ln N / Δ, where Δ is the discounted mixability gap (de Rooij
et al. 2014, arXiv:1301.0534, eq. 8). How fast to forget is learned the same way: learners with several half-lives run
side by side under an AdaHedge of their own.

Arms are kept as the shrinking dartboard keeps them (Geulen, Vöcking and Winkler, COLT 2010): drawn anew only with the
probability that the weight of the one in play has lost, so the distribution is Hedge's while switches are rare.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollspec.tuning.policy import Arm, Outcome, Policy, Vector, register, restored

HALF_LIVES = (16.0, 64.0, 256.0)  # steps after which an observation counts half, one learner each
KEEP = 0.25  # what is kept of the past when the policy's or a drafter's weights move


class _Bucket:
    """What one batch bucket learned. H half-lives, A arms."""

    __slots__ = ("emitted", "gap", "lost", "meta", "meta_gap", "playing", "seconds", "weights")

    def __init__(self, learners: int, arms: int) -> None:
        self.emitted: Vector = np.zeros((learners, arms))
        self.seconds: Vector = np.zeros((learners, arms))
        self.gap: Vector = np.zeros(learners)
        self.weights: Vector = np.full((learners, arms), 1.0 / arms)
        self.lost: Vector = np.zeros(learners)  # discounted losses of the learners
        self.meta_gap: Vector = np.zeros(1)
        self.meta: Vector = np.full(learners, 1.0 / learners)
        self.playing = -1

    def mixed(self) -> Vector:
        """Probabilities of the arms. Shape [A]."""
        return self.meta @ self.weights


@register("hedge")
class Hedge(Policy):
    """Learners of `HALF_LIVES` side by side."""

    full_information = True

    def __init__(self, arms: Sequence[Arm], options: Mapping[str, Any] | None = None, seed: int = 0) -> None:
        super().__init__(arms, options, seed)
        self._keep: Vector = 0.5 ** (1.0 / np.array(HALF_LIVES))
        self._meta_keep = float(self._keep.max())
        self._buckets = defaultdict[int, _Bucket](self._new)

    def _new(self) -> _Bucket:
        return _Bucket(len(self._keep), len(self.arms))

    def choose(self, bucket: int) -> int:  # noqa: D102
        b = self._buckets[bucket]
        if b.playing < 0:
            b.playing = self._draw(b)
        return b.playing

    def observe(self, bucket: int, outcome: Outcome) -> None:  # noqa: D102
        b = self._buckets[bucket]
        before = b.mixed()
        b.emitted = self._keep[:, None] * b.emitted + outcome.emitted
        b.seconds = self._keep[:, None] * b.seconds + outcome.seconds
        rates = (b.emitted / b.seconds).max(axis=1)
        lost = float(b.meta @ rates) * outcome.seconds - outcome.emitted
        lost -= lost.min()
        mean = b.weights @ lost
        b.gap = self._keep * b.gap + _gap(b.weights, lost, b.gap, mean)
        b.meta_gap = self._meta_keep * b.meta_gap + _gap(b.meta[None], mean, b.meta_gap, b.meta @ mean)
        b.lost = self._meta_keep * b.lost + mean - mean.min()
        self._weigh(b, rates)
        if b.playing >= 0 and self.rng.random() * before[b.playing] > b.mixed()[b.playing]:
            b.playing = self._draw(b)

    def prior(self, bucket: int, outcome: Outcome) -> None:  # noqa: D102
        b = self._buckets[bucket]
        if not b.seconds.any():
            b.emitted, b.seconds = b.emitted + outcome.emitted, b.seconds + outcome.seconds
            self._weigh(b, (b.emitted / b.seconds).max(axis=1))

    def changed(self) -> None:  # noqa: D102
        for b in self._buckets.values():
            for name in _KEPT:
                setattr(b, name, KEEP * getattr(b, name))

    def state(self) -> dict[str, Any]:  # noqa: D102
        return {
            "arms": [a.name for a in self.arms],
            "learners": len(self._keep),
            "buckets": {str(k): {name: getattr(b, name).tolist() for name in _KEPT} for k, b in self._buckets.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: D102
        if state.get("arms") != [a.name for a in self.arms] or state.get("learners") != len(self._keep):
            raise ValueError(f"it is about the arms {state.get('arms')}, not {[a.name for a in self.arms]}")
        buckets = defaultdict[int, _Bucket](self._new)
        for key, row in state["buckets"].items():
            b = buckets[int(key)]
            for name, value in restored(row, {name: getattr(b, name) for name in _KEPT}).items():
                setattr(b, name, value)
            if b.seconds.all():
                self._weigh(b, (b.emitted / b.seconds).max(axis=1))
        self._buckets = buckets
        self.changed()

    def _weigh(self, b: _Bucket, rates: Vector) -> None:
        lost = rates[:, None] * b.seconds - b.emitted
        b.weights = _weights(lost, b.gap)
        b.meta = _weights(b.lost[None], b.meta_gap)[0]

    def _draw(self, b: _Bucket) -> int:
        at = np.searchsorted(np.cumsum(b.mixed()), self.rng.random(), side="right")
        return min(int(at), len(self.arms) - 1)


_KEPT = ("emitted", "seconds", "gap", "lost", "meta_gap")


def _eta(gap: Vector, n: int) -> Vector:
    """Learning rates. Nothing lost by mixing yet: as good as infinite, all weight on the least loss."""
    eta: Vector = math.log(max(n, 2)) / np.maximum(gap, 1e-12)
    return eta[:, None]


def _weights(lost: Vector, gap: Vector) -> Vector:
    """AdaHedge's weights for cumulative losses. Shapes [learners, choices], [learners]."""
    raw = np.exp(_eta(gap, lost.shape[1]) * (lost.min(axis=1, keepdims=True) - lost))
    out: Vector = raw / raw.sum(axis=1, keepdims=True)
    return out


def _gap(weights: Vector, lost: Vector, gap: Vector, mean: Vector) -> Vector:
    """Mixability gaps of one round: the mean loss less the mix loss -ln(Σ w exp(-η l)) / η. Shape [learners]."""
    eta = _eta(gap, len(lost))
    least = np.where(weights > 0, lost, np.inf).min(axis=1, keepdims=True)
    shifted = np.exp(np.minimum(eta * (least - lost), 0.0))
    mix = least[:, 0] - np.log((weights * shifted).sum(axis=1)) / eta[:, 0]
    out: Vector = np.maximum(mean - mix, 0.0)
    return out
