"""Draft lengths solved from step costs and an acceptance rate: ReSpec's table and SmartSpec's goodput."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rollspec.tuning.bandits import expected
from rollspec.tuning.profile import REPEATS, ReSpec, SmartSpec, solve
from rollspec.tuning.strategies import make
from rollspec.tuning.strategy import Arm, Outcome

ARMS = (Arm((), 0), Arm(("eagle3",), 2), Arm(("eagle3",), 4))
KS = np.array([0.0, 2.0, 4.0])
CHEAP, DEAR = np.array([1.0, 1.02, 1.04]), np.array([1.0, 3.0, 5.0])


def outcome(played: int, theta: float, seconds: np.ndarray, batch: int = 8, measured: float | None = None) -> Outcome:
    return Outcome(played, batch, batch * expected(np.full(3, theta), KS), seconds, measured)


def test_the_solver_takes_the_arm_of_the_largest_goodput() -> None:
    profile = (CHEAP, np.array([1.0, 1.3, 2.5]), DEAR)
    assert [solve(seconds, np.full(3, 0.6), KS) for seconds in profile] == [2, 1, 0]
    assert [solve(seconds, np.full(3, 0.01), KS) for seconds in profile] == [0, 0, 0]
    # by hand, θ = 1/2: 1, 7/4 and 31/16 tokens in 1, 1.5 and 2 seconds
    assert solve(np.array([1.0, 1.5, 2.0]), np.full(3, 0.5), KS) == 1


def profiled(respec: ReSpec, bucket: int, theta: float, measured: np.ndarray) -> list[int]:
    """Plays until the table has an entry; the cost model's seconds say the opposite of the clock's."""
    plays = []
    for _ in range(3 * REPEATS):
        plays.append(arm := respec.choose(bucket))
        respec.observe(bucket, outcome(arm, theta, measured[::-1].copy(), measured=float(measured[arm])))
    return plays


def test_respec_profiles_every_arm_by_the_clock_and_keeps_to_its_table() -> None:
    respec = ReSpec(ARMS)
    for bucket, measured, best in ((2, CHEAP, 2), (6, DEAR, 0)):
        assert np.bincount(profiled(respec, bucket, 0.8, measured)).tolist() == [REPEATS] * 3
        for _ in range(50):  # what is accepted falls, the table stays
            assert respec.choose(bucket) == best
            respec.observe(bucket, outcome(best, 0.01, CHEAP, measured=float(measured[best])))


def test_respec_solves_its_table_anew_when_weights_move_and_forgets() -> None:
    respec = ReSpec(ARMS)
    profiled(respec, 2, 0.9, CHEAP)
    thetas = []
    for _ in range(12):  # the policy has left the drafter behind
        arm = respec.choose(2)
        respec.observe(2, outcome(arm, 0.0, CHEAP, measured=float(CHEAP[arm])))
        respec.changed()
        thetas.append(respec.theta(2)[2])
    assert thetas == sorted(thetas, reverse=True) and thetas[-1] < 0.1
    assert respec.choose(2) == 0


def test_smartspec_solves_for_goodput_every_twenty_steps() -> None:
    smart, plays = SmartSpec(ARMS), []
    for _ in range(60):
        plays.append(arm := smart.choose(3))
        smart.observe(3, outcome(arm, 0.9, CHEAP if len(plays) < 30 else DEAR))
    changes = [i for i in range(1, 60) if plays[i] != plays[i - 1]]
    assert plays[0] == plays[29] == 2 and plays[-1] == 0
    assert len(changes) == 1 and changes[0] % 20 == 1, "between two solutions the length stands"


def test_smartspecs_acceptance_is_a_moving_average() -> None:
    smart = SmartSpec(ARMS)
    smart.observe(0, outcome(2, 0.2, CHEAP))
    assert smart.state()["buckets"]["0"]["rates"][1] == pytest.approx(0.85 * 0.7 + 0.15 * 0.2)
    for _ in range(100):  # nothing is verified: what would have been accepted counts
        smart.observe(0, outcome(0, 0.2, CHEAP))
    assert smart.state()["buckets"]["0"]["rates"][1] == pytest.approx(0.2, abs=1e-3)


def test_smartspec_drafts_only_for_a_tenth_more() -> None:
    for gain, best in ((1.05, 0), (1.2, 1)):
        smart = SmartSpec(ARMS[:2])
        seconds = np.array([1.0, (1 + 0.7 + 0.49) / gain])
        smart.observe(0, Outcome(1, 1, expected(np.full(2, 0.7), KS[:2]), seconds))
        assert smart.choose(0) == best


@pytest.mark.parametrize("name", ["respec", "smartspec"])
def test_what_was_learned_is_kept(name: str) -> None:
    strategy, again = make(name, ARMS), make(name, ARMS)
    for _ in range(20):
        strategy.observe(1, outcome(strategy.choose(1), 0.5, DEAR, measured=1.0))
    again.restore(json.loads(json.dumps(strategy.state())))
    assert again.state() == strategy.state() and again.choose(1) == strategy.choose(1)
