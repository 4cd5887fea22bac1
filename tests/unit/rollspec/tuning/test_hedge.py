"""Hedge against environments whose optimum is known, and its own formulas."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rollspec.tuning import hedge
from rollspec.tuning.hedge import Hedge
from rollspec.tuning.strategy import Arm, Outcome, Table, bucket_of

KS = np.array([0, 1, 2, 4, 8, 16])
ARMS = [Arm(("suffix",) if k else (), int(k)) for k in KS]


def outcome(rng: np.random.Generator, played: int, batch: int, p: float, c1: float) -> Outcome:
    accepted = rng.geometric(1 - p, size=batch) - 1
    emitted = np.array([batch + np.minimum(accepted, k).sum() for k in KS], float)
    return Outcome(played, batch, emitted, 0.004 + c1 * batch * (1.0 + KS))


def weights(strategy: Hedge, bucket: int) -> Any:
    """Probabilities of the arms in a bucket."""
    return strategy.probabilities(bucket)


def play(
    p: Callable[[int], float], batch: int, c1: float, steps: int, seed: int = 0, strategy: Hedge | None = None
) -> tuple[float, int]:
    """Throughput relative to the best fixed arm per phase of constant p, and the number of switches."""
    rng = np.random.default_rng(seed)
    strategy = strategy or Hedge(ARMS, None, seed)
    got, best, switches, last = np.zeros(2), np.zeros(2), 0, -1
    for t in range(steps):
        arm = strategy.choose(0)
        switches += arm != last
        last = arm
        o = outcome(rng, arm, batch, p(t), c1)
        strategy.observe(0, o)
        got += (o.emitted[arm], o.seconds[arm])
        # The best arm of this p, from the expectation.
        e = batch * (1.0 - p(t) ** (KS + 1)) / (1.0 - p(t))
        k = int((e / o.seconds).argmax())
        best += (e[k], o.seconds[k])
    return float(got[0] / got[1] / (best[0] / best[1])), switches


@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("p", [0.05, 0.4, 0.8, 0.95])
def test_stationary(batch: int, p: float) -> None:
    ratio, switches = play(lambda t: p, batch, 3e-4, 1500)
    assert ratio > 0.96
    assert switches < 60, "thrashing"


def test_regret_per_step_falls() -> None:
    short = np.mean([1 - play(lambda t: 0.7, 8, 3e-4, 100, s)[0] for s in range(8)])
    long = np.mean([1 - play(lambda t: 0.7, 8, 3e-4, 3000, s)[0] for s in range(8)])
    assert long < 0.5 * short


def test_drifting() -> None:
    assert play(lambda t: 0.1 + 0.8 * t / 4000, 8, 3e-4, 4000)[0] > 0.95


def test_abrupt_swap_is_followed_and_faster_when_it_is_announced() -> None:
    """A useless drafter becomes a good one at step 1,000, as by a swap."""

    class Announced(Hedge):
        steps = 0

        def choose(self, bucket: int) -> int:
            self.steps += 1
            if self.steps == 1000:
                self.changed()
            return super().choose(bucket)

    def p(t: int) -> float:
        return 0.05 if t < 1000 else 0.95

    blind = np.mean([play(p, 8, 3e-4, 1400, s)[0] for s in range(4)])
    announced = np.mean([play(p, 8, 3e-4, 1400, s, Announced(ARMS, None, s))[0] for s in range(4)])
    assert announced > blind > 0.6 and announced > 0.9


def test_an_adversary_does_not_make_it_worse_than_the_best_fixed_arm_by_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks in which the arm that led until then is the worst."""
    monkeypatch.setattr(hedge, "HALF_LIVES", (100.0,))
    rng = np.random.default_rng(0)
    strategy = Hedge(ARMS, None, 0)
    got, fixed = np.zeros(2), np.zeros((2, len(ARMS)))
    p = 0.95
    for t in range(6000):
        arm = strategy.choose(0)
        o = outcome(rng, arm, 8, p, 3e-4)
        strategy.observe(0, o)
        got += (o.emitted[arm], o.seconds[arm])
        fixed += (o.emitted, o.seconds)
        if t % 300 == 299:
            p = 0.95 if int(weights(strategy, 0).argmax()) <= 1 else 0.02
    assert got[0] / got[1] > 0.93 * (fixed[0] / fixed[1]).max()


def test_the_ratio_of_sums_decides_not_the_mean_of_ratios() -> None:
    """Arm 1 is twice as fast in cheap steps and half as fast in dear ones, which take nearly all of the time."""
    strategy = Hedge([Arm((), 0), Arm(("d",), 1)], None, 0)
    for t in range(400):
        seconds = np.array([0.1, 0.1]) if t % 2 else np.array([0.001, 0.0005])
        emitted = np.array([1.0, 0.5]) if t % 2 else np.array([1.0, 1.0])
        strategy.choose(0)
        strategy.observe(0, Outcome(0, 1, emitted, seconds))
    assert weights(strategy, 0)[0] > 0.9


def test_weights_are_those_of_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hedge, "HALF_LIVES", (10.0,))
    strategy = Hedge([Arm((), 0), Arm(("d",), 1)], None, 0)
    keep, emitted, seconds, gap, w = 0.5**0.1, np.zeros(2), np.zeros(2), 0.0, np.array([0.5, 0.5])
    rng = np.random.default_rng(3)
    for _ in range(30):
        e, s = 1 + rng.random(2), 0.01 + 0.01 * rng.random(2)
        strategy.observe(4, Outcome(0, 1, e, s))
        emitted, seconds = keep * emitted + e, keep * seconds + s
        rate = (emitted / seconds).max()
        loss = rate * s - e
        loss = loss - loss.min()
        eta = math.log(2) / gap if gap else math.inf
        mix = loss[w > 0].min() if not gap else -math.log((w * np.exp(-eta * loss)).sum()) / eta
        gap = keep * gap + max(0.0, (w * loss).sum() - mix)
        lost = rate * seconds - emitted
        w = np.exp(-math.log(2) / gap * (lost - lost.min())) if gap else (lost <= lost.min()).astype(float)
        w = w / w.sum()
        assert weights(strategy, 4) == pytest.approx(w, abs=1e-9)


def test_buckets_learn_apart() -> None:
    rng = np.random.default_rng(0)
    strategy = Hedge(ARMS, None, 0)
    for _ in range(300):
        strategy.observe(bucket_of(1), outcome(rng, strategy.choose(0), 1, 0.8, 3e-4))
        strategy.observe(bucket_of(64), outcome(rng, strategy.choose(6), 64, 0.3, 3e-4))
    assert ARMS[int(weights(strategy, 0).argmax())].k >= 8
    assert ARMS[int(weights(strategy, 6).argmax())].k == 0


def test_state_survives_json_and_refuses_other_arms() -> None:
    rng = np.random.default_rng(0)
    strategy = Hedge(ARMS, None, 0)
    for _ in range(300):
        strategy.observe(3, outcome(rng, strategy.choose(3), 8, 0.8, 3e-4))
    state = json.loads(json.dumps(strategy.state()))
    again = Hedge(ARMS, None, 1)
    again.restore(state)
    assert weights(again, 3).argmax() == weights(strategy, 3).argmax()
    with pytest.raises(ValueError, match="about the arms"):
        Hedge(ARMS[:3], None, 0).restore(state)
    state["buckets"]["3"]["gap"] = -1.0
    with pytest.raises(ValueError, match="cannot be"):
        Hedge(ARMS, None, 0).restore(state)


def test_tables() -> None:
    table = Table(ARMS, {"table": {64: 0, 4: 8, 16: 2}})
    assert [ARMS[table.choose(bucket_of(b))].k for b in (1, 4, 5, 16, 17, 64, 200)] == [8, 8, 2, 2, 0, 0, 0]


def test_bucket_edges() -> None:
    assert [bucket_of(b) for b in (0, 1, 2, 3, 4, 5, 8, 9, 64, 65)] == [0, 0, 1, 2, 2, 3, 3, 4, 6, 7]
