"""Environments whose best arm is known, to see what strategies lose: how many tokens a step emits under every arm.

A request's proposal has an accepted length a with P(a >= n) = p^n; an arm with draft length K emits min(a, K) + 1 of
it, so the arms of one drafter share each draw, as they do in an engine. Another drafter has draws of its own; only a
full-information strategy reads them, and in an engine that would mean that all of them draft. What happens does not
depend on what is played: strategies that play the same environment see the same steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollspec.tuning.strategies import make
from rollspec.tuning.strategy import Arm, Outcome, Strategy, Vector

Matrix = npt.NDArray[np.float64]
Plays = npt.NDArray[np.int64]

LENGTHS = tuple(Arm(("suffix",) if k else (), k) for k in (0, 1, 2, 4, 8))
BATCH = 16
GOOD, USELESS = 0.85, 0.05


def cost(arms: Sequence[Arm], batch: int) -> Vector:
    """Seconds of a step: a forward pass, each verified token, each drafted position. Shape [arms]."""
    ks = np.array([a.k for a in arms], float)
    return 0.010 + 0.00005 * batch * (1.0 + ks) + 0.0003 * ks


class Environment:
    """Steps drawn from given acceptance rates.

    Args:
        acceptance: chance that a drafted token is accepted. Shape [steps, drafters], drafters in the order of `arms`.
        arms: what can be played.
        batch: requests in a step.
        seed: of the draws.
        seconds: of a step under each arm, `cost` if unset. Shape [arms].
    """

    def __init__(
        self,
        acceptance: Matrix,
        arms: Sequence[Arm] = LENGTHS,
        batch: int = BATCH,
        seed: int = 0,
        seconds: Vector | None = None,
    ) -> None:
        self.arms, self.batch, self.steps = tuple(arms), batch, len(acceptance)
        self.seconds = cost(arms, batch) if seconds is None else seconds
        who = list(dict.fromkeys(a.drafters for a in arms if a.k))
        p = np.clip(acceptance, 1e-6, 1.0 - 1e-6)  # [steps, drafters]
        draws = 1.0 - np.random.default_rng(seed).random((*p.shape, batch))  # in (0, 1]
        accepted = np.floor(np.log(draws) / np.log(p)[..., None])  # [steps, drafters, batch]
        self.emitted: Matrix = np.full((self.steps, len(arms)), float(batch))
        self.expected: Matrix = self.emitted.copy()
        """Mean of `emitted`, given the acceptance rates. Shape [steps, arms]."""
        for i, arm in enumerate(arms):
            if arm.k:
                d = who.index(arm.drafters)
                self.emitted[:, i] += np.minimum(accepted[:, d], arm.k).sum(-1)
                self.expected[:, i] = batch * (1.0 - p[:, d] ** (arm.k + 1)) / (1.0 - p[:, d])

    def step(self, t: int, played: int) -> Outcome:
        """The outcome of step `t` if `played` is played."""
        return Outcome(played, self.batch, self.emitted[t].copy(), self.seconds.copy())

    def rates(self) -> Matrix:
        """Expected tokens per second. Shape [steps, arms]."""
        return self.expected / self.seconds

    def optimal(self) -> Plays:
        """The arm with the highest expected rate in each step: the oracle. Shape [steps]."""
        return np.asarray(self.rates().argmax(1), np.int64)

    def throughput(self, plays: Plays) -> float:
        """Tokens per second of playing `plays`, as drawn."""
        at = np.arange(len(plays))
        return float(self.emitted[at, plays].sum() / self.seconds[plays].sum())

    def best_fixed(self) -> int:
        """The one arm that would have had the highest throughput over all steps, as drawn."""
        return int((self.emitted.sum(0) / self.seconds).argmax())


def stationary(steps: int, seed: int = 0, p: float = 0.7) -> Environment:
    """The same acceptance throughout."""
    return Environment(np.full((steps, 1), p), seed=seed)


def drifting(steps: int, seed: int = 0, low: float = 0.2, high: float = 0.9) -> Environment:
    """Acceptance rises from `low` to `high` and falls back once, slowly."""
    middle, half = (low + high) / 2, (high - low) / 2
    return Environment((middle - half * np.cos(np.linspace(0.0, 2.0 * np.pi, steps)))[:, None], seed=seed)


def swap(steps: int, seed: int = 0, rates: Sequence[float] = (GOOD, USELESS, GOOD)) -> Environment:
    """The drafter becomes useless, or good, at once: equal stretches of `rates`."""
    at = np.minimum(np.arange(steps) * len(rates) // steps, len(rates) - 1)
    return Environment(np.array(rates)[at][:, None], seed=seed)


def adversarial(steps: int, seed: int = 0, block: int = 4, arms: Sequence[Arm] = LENGTHS) -> Environment:
    """Before each block a shadow UCBSpec is asked what it would play, and the drafter made good or useless, whichever
    is worse for that arm. UCBSpec draws nothing at random, so one that plays here does as its shadow did: where
    blocks last one step it is always wrong.
    """
    worlds = [Environment(np.full((steps, 1), p), arms, seed=seed) for p in (GOOD, USELESS)]
    left = [w.rates()[0] / w.rates()[0].max() for w in worlds]  # of the best rate of that world, per arm
    shadow, env = make("ucbspec", arms), worlds[0]
    for t in range(steps):
        played = shadow.choose(0)
        if t % block == 0:
            world = worlds[int(left[1][played] < left[0][played])]
        env.emitted[t], env.expected[t] = world.emitted[t], world.expected[t]
        shadow.observe(0, env.step(t, played))
    return env


def drafters(steps: int, seed: int = 0, prompt: int = 150) -> Environment:
    """BanditSpec's first setting (arXiv:2505.15141, section 6.1): batch 1, several drafters with one K, equal seconds.

    Prompts last `prompt` steps in the mean; each has a hidden domain. One drafter is fair everywhere, the others are
    good in their own domain. The paper's learners start anew with each prompt; these continue.
    """
    rng = np.random.default_rng([seed, 1])
    table = np.array([[0.65, 0.85, 0.35, 0.35], [0.65, 0.35, 0.85, 0.35], [0.65, 0.35, 0.35, 0.85]])
    starts = rng.random(steps) < 1.0 / prompt
    domains = rng.integers(len(table), size=steps)[np.maximum.accumulate(np.where(starts, np.arange(steps), 0))]
    arms = [Arm((name,), 8) for name in ("general", "code", "maths", "prose")]
    return Environment(table[domains], arms, 1, seed, np.full(len(arms), 0.012))


ENVIRONMENTS = {f.__name__: f for f in (stationary, drifting, swap, adversarial, drafters)}


@dataclass(frozen=True)
class Run:
    """What playing gave. `regret`: cumulative expected tokens that the best arm of each step would have added in the
    time spent. Shape [steps]. `throughput`: tokens per second, as drawn.
    """

    plays: Plays
    regret: Vector
    throughput: float


def play(strategy: Strategy, environment: Environment, steps: int | None = None, bucket: int = 0) -> Run:
    """Let `strategy` play the first `steps` steps."""
    n = environment.steps if steps is None else steps
    plays = np.zeros(n, dtype=np.int64)
    for t in range(n):
        plays[t] = strategy.choose(bucket)
        strategy.observe(bucket, environment.step(t, int(plays[t])))
    at = np.arange(n)
    lost = environment.rates()[:n].max(1) * environment.seconds[plays] - environment.expected[at, plays]
    return Run(plays, np.cumsum(lost), environment.throughput(plays))
