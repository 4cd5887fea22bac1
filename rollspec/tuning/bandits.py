"""Published bandits, for comparison: each learns only from the arm that it played.

The papers do not react to new weights, so `changed` does nothing here. All keep one learner per batch bucket.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, ClassVar

import numpy as np

from rollspec.errors import ConfigError
from rollspec.tuning.policy import Arm, Outcome, Policy, Vector, bucket_of, register

Learner = dict[str, Vector]  # what a bucket learned: named arrays, [arms] unless the policy says otherwise
_REWARDS = {"goodput": 0.0, "length": 1.0}  # kind: its least value; the greatest is L + 1


class Bandit(Policy):
    """Options, learners and their state."""

    ragged: ClassVar[bool] = False  # whether a learner's arrays may have any length

    def __init__(self, arms: Sequence[Arm], options: Mapping[str, Any] | None = None, seed: int = 0) -> None:
        super().__init__(arms, options, seed)
        self._left = dict(self.options)
        self._buckets: defaultdict[int, Learner] = defaultdict(self._new)
        known = self._configure()
        if self._left:
            name, value = next(iter(self._left.items()))
            near = get_close_matches(str(name), known, 1, 0.0)[0]
            raise _refused(str(name), value, f"is not an option of {self.name}; use {near}")

    @abstractmethod
    def _configure(self) -> list[str]:
        """Take the options out of `_left`; their names."""

    @abstractmethod
    def _new(self) -> Learner:
        """A bucket that has seen nothing."""

    def _number(self, name: str, default: float, valid: Callable[[float], bool], needed: str) -> float:
        value = self._left.pop(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not valid(value):
            raise _refused(name, value, f"cannot be used; give {needed}")
        return float(value)

    def state(self) -> dict[str, Any]:  # noqa: D102
        buckets = {str(k): {name: a.tolist() for name, a in b.items()} for k, b in self._buckets.items()}
        return {"arms": [a.name for a in self.arms], "buckets": buckets}

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: D102
        if state.get("arms") != [a.name for a in self.arms]:
            raise ValueError(f"it is about the arms {state.get('arms')}, not {[a.name for a in self.arms]}")
        restored: dict[int, Learner] = {}
        for key, row in state["buckets"].items():
            new = self._new()
            b = {name: np.array(values, float) for name, values in row.items()}
            if b.keys() != new.keys() or not all(
                x.ndim == 1 and np.isfinite(x).all() and (x >= 0).all() and (self.ragged or len(x) == len(new[n]))
                for n, x in b.items()
            ):
                raise ValueError(f"bucket {key} holds numbers that cannot be")
            restored[int(key)] = b
        self._buckets = defaultdict(self._new, restored)


def _refused(name: str, value: object, why: str) -> ConfigError:
    return ConfigError(f"rollspec: tuning.options.{name} = {value!r} {why}.")


class _Bounded(Bandit):
    """Bandits whose theory needs rewards in a known range.

    Option `reward`: `goodput` (default), tokens per measured second over those that the cost model gives the same step
    without speculation, clipped to [0, L + 1] with L the longest draft (the first arm stands in where no K is 0);
    `length`, the paper's own, tokens per request, in [1, L + 1].
    """

    def _configure(self) -> list[str]:
        kind = self._left.pop("reward", "goodput")
        if kind not in list(_REWARDS):
            raise _refused("reward", kind, f"does not exist; choose one of {', '.join(_REWARDS)}")
        self._relative = kind == "goodput"
        self._low, self._top = _REWARDS[kind], 1.0 + max(a.k for a in self.arms)
        self._span = max(self._top - self._low, 1.0)
        self._base = next((i for i, a in enumerate(self.arms) if a.k == 0), 0)
        return ["reward"]

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

    where n_i counts the plays of arm i, t those of all K arms, and L is the width of the rewards' range. The released
    code (sail-sg/BanditSpec) differs: its radius, sqrt(6 ln t / Σ n_i), is the same for all arms and so never changes
    which is best; its reward is raw tokens per second. The text read for this had lost its root signs; this one is that
    of the bound which the proof cites (Abbasi-Yadkori et al. 2011, Lemma 6).
    Options: `reward`; `delta`, 1/2 as in the proof of Theorem 4.3.
    """

    def _configure(self) -> list[str]:
        self._delta = self._number("delta", 0.5, lambda x: 0 < x < 1, "a probability between 0 and 1, both excluded")
        return [*super()._configure(), "delta"]

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
        log = np.log(len(n) * n.sum() ** 2 * np.sqrt(1 + n) / self._delta)
        bound: Vector = sums / n + self._span / 2 * np.sqrt((1 + n) / n**2 * (1 + 2 * log))
        return bound


@register("exp3spec")
class EXP3Spec(_Bounded):
    """EXP3Spec of BanditSpec (Hou et al., ICML 2025, arXiv:2505.15141), Algorithms 5 and 9: anytime EXP3.

    Round t draws arm i with p_i ∝ exp(-η_t Σ Z_i) (eq. 14), η_t = sqrt(ln K / (t K)), and adds to the drawn arm's
    Z_i the loss (L + 1 - y)/(L p_i) (eq. 13); L is the width of the rewards' range. The text read for this had lost its
    root signs; that of η_t is the one of the anytime EXP3 which the paper adapts (Lattimore and Szepesvári 2020).
    Option: `reward`.
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
            return  # another policy chose this arm, so no probability belongs to it
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
    (mit-han-lab/fastrl), not the paper; that an unplayed strategy comes first, ε = 0.1 and w = 300 are the code's. Its
    sets are for batches of 1, 2-4, 5-20 and 21-32, more tokens for the smaller ones, and it drafts nothing above 32
    (`configs/tlt.yaml`). With one strategy in each, it never explores; here every bucket has all arms unless `sets`
    says otherwise.
    Simplified: a learner per octave of the batch size, not per size up to 31; the step's own accept length, where the
    code takes its median over all batch sizes; drafting begins at once when the batch falls to 32, not ten steps later.
    Steps that also computed prompts teach nothing.
    Options: `epsilon`; `window`, plays of an arm; `sets`, {batch size up to which it holds: [K, ...]}, the last beyond.
    """

    ragged, measures = True, True

    def _configure(self) -> list[str]:
        self._epsilon = self._number("epsilon", 0.1, lambda x: 0 <= x <= 1, "a probability from 0 to 1")
        self._window = int(self._number("window", 300, lambda x: x >= 1 and x % 1 == 0, "a whole number from 1 on"))
        self._sets = self._read_sets(self._left.pop("sets", None))
        self._medians: dict[tuple[int, int], float] = {}  # by bucket and arm: sorting windows is what takes the time
        return ["epsilon", "window", "sets"]

    def _read_sets(self, given: Any) -> list[tuple[int, list[int]]]:
        if given is None:
            return [(0, list(range(len(self.arms))))]
        ks = {a.k for a in self.arms}
        try:
            rows = sorted((int(b), [int(k) for k in members]) for b, members in dict(given).items())
        except (TypeError, ValueError):
            rows = []
        if not rows or any(not members or set(members) - ks for _, members in rows):
            remedy = f"batch sizes to lists of draft lengths that are among {sorted(ks)}"
            raise _refused("sets", given, f"cannot be used; map {remedy}")
        return [(bucket_of(b), [i for i, a in enumerate(self.arms) if a.k in members]) for b, members in rows]

    def _new(self) -> Learner:
        return {str(a): np.zeros(0) for a in range(len(self.arms))}

    def choose(self, bucket: int) -> int:  # noqa: D102
        valid = self.valid(bucket)
        if len(valid) > 1 and self.rng.random() < self._epsilon:
            return int(self.rng.choice(valid))
        return max(valid, key=lambda a: self._medians.get((bucket, a), math.inf))

    def observe(self, bucket: int, outcome: Outcome) -> None:  # noqa: D102
        b, arm = self._buckets[bucket], outcome.played
        b[str(arm)] = np.append(b[str(arm)], outcome.reward())[-self._window :]
        self._medians[bucket, arm] = float(np.median(b[str(arm)]))

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: D102
        super().restore(state)
        pairs = ((k, a, b[str(a)][-self._window :]) for k, b in self._buckets.items() for a in range(len(self.arms)))
        self._medians = {(k, a): float(np.median(rewards)) for k, a, rewards in pairs if len(rewards)}

    def valid(self, bucket: int) -> list[int]:
        """The arms of a bucket."""
        return next((arms for b, arms in self._sets if bucket % 16 <= b), self._sets[-1][1])


@register("thompson")
class Thompson(Bandit):
    """Thompson sampling after EESD (Liu et al., Findings of ACL 2024, arXiv:2406.03853), made to choose K.

    A Beta posterior over θ, the probability that a drafted token is accepted, for each set of drafters. A step draws θ
    and plays the arm with the most expected tokens per second: batch · (1 - θ^(K+1))/(1 - θ) over the last seen
    `seconds`; before any were seen, the arm with the most expected tokens, the longest.

    EESD instead lets the draw decide, token by token, whether to draft on, and weighs no time; its exact update
    and its calibrated variant could not be checked. Here tokens behind the first rejected one count neither way. A step
    gives how many tokens were accepted in all, not how many requests met a rejection; that follows from the arm's mean
    accepted length m: requests · (1 - p^K) where p (1 - p^K)/(1 - p) = m.
    Options: `alpha` and `beta`, the prior, 1 and 1 if unset.
    """

    def _configure(self) -> list[str]:
        self._alpha = self._number("alpha", 1.0, lambda x: 0 < x < math.inf, "a positive number")
        self._beta = self._number("beta", 1.0, lambda x: 0 < x < math.inf, "a positive number")
        self._ks: Vector = np.array([a.k if a.drafters else 0 for a in self.arms], float)
        who = [a.drafters for a in self.arms]
        self._group = np.array([who.index(d) for d in who])
        return ["alpha", "beta"]

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
        return np.array(self._alpha + accepted, float), np.array(self._beta + rejected, float)


def expected(theta: Vector, k: Vector) -> Vector:
    """Tokens that a request emits in a step: (1 - θ^(K+1))/(1 - θ) (Leviathan et al. 2023, eq. 1)."""
    theta = np.minimum(theta, 1.0 - 1e-9)
    emitted: Vector = (1.0 - theta ** (k + 1.0)) / (1.0 - theta)
    return emitted


def acceptance(mean: float, k: float) -> float:
    """The θ at which a draft of `k` tokens has `mean` of them accepted."""
    low, high = 0.0, 1.0
    for _ in range(40):
        theta = (low + high) / 2
        low, high = (theta, high) if theta * (1 - theta**k) / (1 - theta) < mean else (low, theta)
    return high if mean < k else 1.0
