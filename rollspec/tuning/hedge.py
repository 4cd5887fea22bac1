"""The default strategy: discounted full-information Hedge over what each arm would have given.

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
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollspec.tuning.strategy import Arm, Learner, Learning, Outcome, Vector, register

HALF_LIVES = (16.0, 64.0, 256.0)  # steps after which an observation counts half, one learner each
KEEP = 0.25  # what is kept of the past when the policy's or a drafter's weights move


@dataclass(slots=True)
class _Mix:
    """How a batch bucket weighs its learners and arms, and the arm in play. H half-lives, A arms."""

    weights: Vector  # [H, A]
    meta: Vector  # [H]
    playing: int = -1


@register("hedge")
class Hedge(Learning):
    """Learners of `HALF_LIVES` side by side."""

    full_information = True

    def __init__(self, arms: Sequence[Arm], options: Mapping[str, Any] | None = None, seed: int = 0) -> None:
        super().__init__(arms, options, seed)
        self._keep: Vector = 0.5 ** (1.0 / np.array(HALF_LIVES))
        self._meta_keep = float(self._keep.max())
        h, a = len(self._keep), len(self.arms)
        self._mixes: defaultdict[int, _Mix] = defaultdict(lambda: _Mix(np.full((h, a), 1.0 / a), np.full(h, 1.0 / h)))

    def _new(self) -> Learner:
        h, a = len(self._keep), len(self.arms)
        shapes = {"emitted": (h, a), "seconds": (h, a), "gap": (h,), "lost": (h,), "meta_gap": (1,)}
        return {name: np.zeros(shape) for name, shape in shapes.items()}

    def probabilities(self, bucket: int) -> Vector:
        """Of the arms. Shape [A]."""
        mix = self._mixes[bucket]
        return mix.meta @ mix.weights

    def choose(self, bucket: int) -> int:  # noqa: D102
        mix = self._mixes[bucket]
        if mix.playing < 0:
            mix.playing = self._draw(bucket)
        return mix.playing

    def observe(self, bucket: int, outcome: Outcome) -> None:  # noqa: D102
        b, mix = self._buckets[bucket], self._mixes[bucket]
        before = self.probabilities(bucket)
        b["emitted"] = self._keep[:, None] * b["emitted"] + outcome.emitted
        b["seconds"] = self._keep[:, None] * b["seconds"] + outcome.seconds
        rates = (b["emitted"] / b["seconds"]).max(axis=1)
        lost = float(mix.meta @ rates) * outcome.seconds - outcome.emitted
        lost -= lost.min()
        mean = mix.weights @ lost
        b["gap"] = self._keep * b["gap"] + _gap(mix.weights, lost, b["gap"], mean)
        b["meta_gap"] = self._meta_keep * b["meta_gap"] + _gap(mix.meta[None], mean, b["meta_gap"], mix.meta @ mean)
        b["lost"] = self._meta_keep * b["lost"] + mean - mean.min()
        self._weigh(bucket, rates)
        if mix.playing >= 0 and self.rng.random() * before[mix.playing] > self.probabilities(bucket)[mix.playing]:
            mix.playing = self._draw(bucket)

    def prior(self, bucket: int, outcome: Outcome) -> None:  # noqa: D102
        b = self._buckets[bucket]
        if not b["seconds"].any():
            b["emitted"], b["seconds"] = b["emitted"] + outcome.emitted, b["seconds"] + outcome.seconds
            self._weigh(bucket, (b["emitted"] / b["seconds"]).max(axis=1))

    def changed(self) -> None:  # noqa: D102
        for b in self._buckets.values():
            for name in b:
                b[name] = KEEP * b[name]

    def state(self) -> dict[str, Any]:  # noqa: D102
        return {**super().state(), "learners": len(self._keep)}

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: D102
        super().restore(state)
        self._mixes.clear()
        for bucket, b in self._buckets.items():
            if b["seconds"].all():
                self._weigh(bucket, (b["emitted"] / b["seconds"]).max(axis=1))
        self.changed()

    def _weigh(self, bucket: int, rates: Vector) -> None:
        b, mix = self._buckets[bucket], self._mixes[bucket]
        mix.weights = _weights(rates[:, None] * b["seconds"] - b["emitted"], b["gap"])
        mix.meta = _weights(b["lost"][None], b["meta_gap"])[0]

    def _draw(self, bucket: int) -> int:
        at = np.searchsorted(np.cumsum(self.probabilities(bucket)), self.rng.random(), side="right")
        return min(int(at), len(self.arms) - 1)


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
