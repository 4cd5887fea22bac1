"""Published bandits, for comparison: each learns only from the arm that it played.

The papers do not react to new weights, so `changed` does nothing here. All keep one learner per batch bucket, with the
parameters of their papers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollspec.tuning.strategy import Arm, Learner, Learning, Outcome, Vector, by_batch, register

DELTA = 0.5  # of UCBSpec, as in the proof of Theorem 4.3
EPSILON, WINDOW = 0.1, 300  # of BEG-MAB, as in its code: chance of a random arm, and plays of an arm that it remembers


class Bandit(Learning):
    """What all of them know of their arms."""

    def __init__(self, arms: Sequence[Arm], options: Mapping[str, Any] | None = None, seed: int = 0) -> None:
        super().__init__(arms, options, seed)
        self._ks: Vector = np.array([a.k if a.drafters else 0 for a in self.arms], float)
        who = [a.drafters for a in self.arms]
        self._group = np.array([who.index(d) for d in who])  # the first arm with the same drafters


class _Bounded(Bandit):
    """Bandits whose theory needs rewards in a known range.

    Option `reward`: `goodput` (default), tokens per measured second over those that the cost model gives the same step
    without speculation, clipped to [0, L + 1] with L the longest draft (the first arm stands in where no K is 0);
    `length`, the paper's own, tokens per request, in [1, L + 1].
    """

    def __init__(self, arms: Sequence[Arm], options: Mapping[str, Any] | None = None, seed: int = 0) -> None:
        super().__init__(arms, options, seed)
        self._relative = self.options.get("reward") != "length"
        self._low, self._top = 0.0 if self._relative else 1.0, 1.0 + max(a.k for a in self.arms)
        self._span = max(self._top - self._low, 1.0)
        self._base = next((i for i, a in enumerate(self.arms) if a.k == 0), 0)

    def reward(self, outcome: Outcome) -> float:
        """What the played arm earned, within the range."""
        earned = float(outcome.emitted[outcome.played]) / outcome.batch
        if self._relative:  # without speculation, `batch` tokens are emitted
            earned *= float(outcome.seconds[self._base]) / outcome.elapsed
        return min(max(earned, self._low), self._top)


@register("ucbspec")
class UCBSpec(_Bounded):
    """UCBSpec of BanditSpec (Hou et al., ICML 2025, arXiv:2505.15141), Algorithm 4.

    After every arm once, the arm with the largest (eq. 5-7)

        mean_i + L/2 · sqrt((1 + n_i)/n_i² · (1 + 2 ln(K t² (1 + n_i)^½ / δ)))

    where n_i counts the plays of arm i, t those of all K arms, and L is the width of the rewards' range. The radius of
    the released code (sail-sg/BanditSpec) is the same for all arms and so never changes which is best. The text read
    for this had lost its root signs; this one is that of the bound which the proof cites (Abbasi-Yadkori et al. 2011,
    Lemma 6).
    """

    def _new(self) -> Learner:
        return {"plays": np.zeros(len(self.arms)), "sums": np.zeros(len(self.arms))}

    def choose(self, bucket: int) -> int:  # noqa: D102
        plays = self._buckets[bucket]["plays"]
        return int(self.index(bucket).argmax() if plays.all() else plays.argmin())

    def observe(self, bucket: int, outcome: Outcome) -> None:  # noqa: D102
        b = self._buckets[bucket]
        b["plays"][outcome.played] += 1
        b["sums"][outcome.played] += self.reward(outcome)

    def index(self, bucket: int) -> Vector:
        """Upper confidence bounds, once every arm was played. Shape [arms]."""
        n, sums = self._buckets[bucket]["plays"], self._buckets[bucket]["sums"]
        log = np.log(len(n) * n.sum() ** 2 * np.sqrt(1 + n) / DELTA)
        bound: Vector = sums / n + self._span / 2 * np.sqrt((1 + n) / n**2 * (1 + 2 * log))
        return bound


@register("exp3spec")
class EXP3Spec(_Bounded):
    """EXP3Spec of BanditSpec (Hou et al., ICML 2025, arXiv:2505.15141), Algorithms 5 and 9: anytime EXP3.

    Round t draws arm i with p_i ∝ exp(-η_t Σ Z_i) (eq. 14), η_t = sqrt(ln K / (t K)), and adds to the drawn arm's
    Z_i the loss (L + 1 - y)/(L p_i) (eq. 13); L is the width of the rewards' range. The text read for this had lost its
    root signs; that of η_t is the one of the anytime EXP3 which the paper adapts (Lattimore and Szepesvári 2020).
    """

    def _new(self) -> Learner:
        return {"losses": np.zeros(len(self.arms)), "rounds": np.zeros(1), "drawn": np.zeros(len(self.arms))}

    def choose(self, bucket: int) -> int:  # noqa: D102
        p = self.probabilities(bucket)
        arm = int(self.rng.choice(len(p), p=p))
        self._buckets[bucket]["drawn"][arm] = p[arm]
        return arm

    def observe(self, bucket: int, outcome: Outcome) -> None:  # noqa: D102
        b = self._buckets[bucket]
        p = float(b["drawn"][outcome.played])
        if p == 0.0:
            return  # another strategy chose this arm, so no probability belongs to it
        b["rounds"] += 1
        b["losses"][outcome.played] += (self._top - self.reward(outcome)) / (self._span * p)

    def probabilities(self, bucket: int) -> Vector:
        """Of the next round. Shape [arms]."""
        b, n = self._buckets[bucket], len(self.arms)
        eta = math.sqrt(math.log(n) / (n * (float(b["rounds"][0]) + 1)))
        weights = np.exp(-eta * (b["losses"] - b["losses"].min()))
        p: Vector = weights / weights.sum()
        return p


@register("beg_mab")
class BegMab(Bandit):
    """BEG-MAB of TLT (Hu et al., ASPLOS 2026, arXiv:2511.16665), its bucketed epsilon-greedy tuner.

    A batch bucket has a set of strategies. A set of one is played; otherwise with probability ε a random member, else
    the one with the highest median of its last w rewards,

        accept length x batch / elapsed seconds of the step, drafting included: tokens per second.

    Weights that move clear no window. Read from summaries of the paper's algorithm and the released code
    (mit-han-lab/fastrl), not the paper; that an unplayed strategy comes first is the code's. Its sets are for batches
    of 1, 2-4, 5-20 and 21-32, and it drafts nothing above 32 (`configs/tlt.yaml`); here every bucket has all arms
    unless `sets` says otherwise.
    Simplified: a learner per octave of the batch size; the step's own accept length, where the code takes its median
    over all batch sizes; drafting begins at once when the batch falls to 32, not ten steps later. Steps that also
    computed prompts teach nothing.
    Option `sets`: {batch size up to which it holds: [K, ...]}, the last beyond.
    """

    ragged, measures = True, True

    def __init__(self, arms: Sequence[Arm], options: Mapping[str, Any] | None = None, seed: int = 0) -> None:
        super().__init__(arms, options, seed)
        self._medians: dict[tuple[int, int], float] = {}  # by bucket and arm: sorting windows is what takes the time

    def _new(self) -> Learner:
        return {str(a): np.zeros(0) for a in range(len(self.arms))}

    def choose(self, bucket: int) -> int:  # noqa: D102
        valid = self.valid(bucket)
        if len(valid) > 1 and self.rng.random() < EPSILON:
            return int(self.rng.choice(valid))
        return max(valid, key=lambda a: self._medians.get((bucket, a), math.inf))

    def observe(self, bucket: int, outcome: Outcome) -> None:  # noqa: D102
        b, arm = self._buckets[bucket], outcome.played
        b[str(arm)] = np.append(b[str(arm)], outcome.emitted[arm] / outcome.elapsed)[-WINDOW:]
        self._medians[bucket, arm] = float(np.median(b[str(arm)]))

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: D102
        super().restore(state)
        paid = ((k, int(a), rewards) for k, b in self._buckets.items() for a, rewards in b.items())
        self._medians = {(k, a): float(np.median(rewards)) for k, a, rewards in paid if len(rewards)}

    def valid(self, bucket: int) -> list[int]:
        """The arms of a bucket."""
        sets = self.options.get("sets")
        return [i for i, a in enumerate(self.arms) if not sets or a.k in by_batch(sets, bucket)]


@register("thompson")
class Thompson(Bandit):
    """Thompson sampling after EESD (Liu et al., Findings of ACL 2024, arXiv:2406.03853), made to choose K.

    A Beta posterior over θ, the probability that a drafted token is accepted, for each set of drafters, from (1, 1) on.
    A step draws θ and plays the arm with the most expected tokens per second: batch · (1 - θ^(K+1))/(1 - θ) over the
    last seen `seconds`; before any were seen, the longest.

    EESD instead lets the draw decide, token by token, whether to draft on, and weighs no time. Here tokens behind the
    first rejected one count neither way. How many requests met a rejection follows from the arm's mean accepted length
    m: requests · (1 - p^K) where p (1 - p^K)/(1 - p) = m.
    """

    def _new(self) -> Learner:
        return {name: np.zeros(len(self.arms)) for name in ("accepted", "rejected", "requests", "seconds")}

    def choose(self, bucket: int) -> int:  # noqa: D102
        b = self._buckets[bucket]
        alpha, beta = self.posterior(bucket)
        emitted = expected(self.rng.beta(alpha, beta)[self._group], self._ks)
        return int((emitted / b["seconds"] if b["seconds"].all() else emitted).argmax())

    def observe(self, bucket: int, outcome: Outcome) -> None:  # noqa: D102
        b, arm = self._buckets[bucket], outcome.played
        b["seconds"] = outcome.seconds.astype(float)
        if not self._ks[arm]:
            return
        b["accepted"][arm] += outcome.emitted[arm] - outcome.batch
        b["requests"][arm] += outcome.batch
        p = acceptance(float(b["accepted"][arm] / b["requests"][arm]), float(self._ks[arm]))
        b["rejected"][arm] = b["requests"][arm] * (1.0 - p ** self._ks[arm])

    def posterior(self, bucket: int) -> tuple[Vector, Vector]:
        """Both parameters of the Beta distribution, at the first arm of each set of drafters. Shapes [arms]."""
        b = self._buckets[bucket]
        accepted, rejected = (np.bincount(self._group, b[x], len(self.arms)) for x in ("accepted", "rejected"))
        return np.array(1.0 + accepted, float), np.array(1.0 + rejected, float)


def expected(theta: Vector, k: Vector) -> Vector:
    """Tokens that a request emits in a step: (1 - θ^(K+1))/(1 - θ) (Leviathan et al. 2023, eq. 1)."""
    theta = np.minimum(theta, 1.0 - 1e-9)
    return (1.0 - theta ** (k + 1.0)) / (1.0 - theta)


def acceptance(mean: float, k: float) -> float:
    """The θ at which a draft of `k` tokens has `mean` of them accepted."""
    low, high = 0.0, 1.0
    for _ in range(40):
        theta = (low + high) / 2
        low, high = (theta, high) if theta * (1 - theta**k) / (1 - theta) < mean else (low, theta)
    return high if mean < k else 1.0
