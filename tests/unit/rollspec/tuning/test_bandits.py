"""Published bandits against their formulas, and in environments whose best arm is known."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import bandits as benchmark
from benchmarks.simulate import ENVIRONMENTS, LENGTHS, Environment, adversarial, play, stationary, swap
from rollspec.tuning import bandits
from rollspec.tuning.bandits import BegMab, EXP3Spec, Thompson, UCBSpec, acceptance, expected
from rollspec.tuning.strategies import make
from rollspec.tuning.strategy import Arm, Outcome, Strategy

NAMES = ("ucbspec", "exp3spec", "beg_mab", "thompson")
NONE, SHORT, LONG = Arm((), 0), Arm(("suffix",), 2), Arm(("suffix",), 4)
PAIR = (NONE, SHORT)
LENGTH = {"reward": "length"}


def outcome(played: int, emitted: list[float], batch: int = 1, seconds: list[float] | None = None) -> Outcome:
    return Outcome(played, batch, np.array(emitted), np.array(seconds or [1.0] * len(emitted)))


# ---- formulas


def test_ucb_index_is_the_papers() -> None:
    ucb = UCBSpec(PAIR, LENGTH)
    for played in (0, 0, 1):
        ucb.observe(5, outcome(played, [1.0, 3.0]))
    # L = 2, K = 2, t = 3, delta = 1/2: 1 + sqrt(3/4 (1 + 2 ln(36 sqrt 3))) and 3 + sqrt(2 (1 + 2 ln(36 sqrt 2)))
    assert ucb.index(5) == pytest.approx([3.63614, 7.20956], abs=1e-4)
    assert ucb.choose(5) == 1


def test_ucb_counts_per_arm_and_plays_each_once_first() -> None:
    ucb, seen = UCBSpec((NONE, SHORT, LONG), LENGTH), []
    for _ in range(3):
        seen.append(ucb.choose(0))
        ucb.observe(0, outcome(seen[-1], [1.0, 1.0, 1.0]))
    assert seen == [0, 1, 2]
    for _ in range(9):
        ucb.observe(0, outcome(0, [1.0, 1.0, 1.0]))
    index = ucb.index(0)
    assert index[0] < index[1] == index[2]  # with the radius of the released code all three would be equal


def test_exp3_weighs_losses_by_their_probability() -> None:
    exp3 = EXP3Spec(PAIR, LENGTH)
    played = exp3.choose(0)
    exp3.observe(0, outcome(played, [1.0, 1.0]))
    assert exp3.state()["buckets"]["0"]["losses"][played] == pytest.approx(2.0)  # (L + 1 - 1) / (L / 2) with L = 2
    # eta_2 = sqrt(ln 2 / 4); exp(-2 eta_2) = 0.434937
    assert exp3.probabilities(0)[played] == pytest.approx(0.434937 / 1.434937, abs=1e-5)


def test_exp3_ignores_an_arm_it_did_not_draw() -> None:
    exp3 = EXP3Spec(PAIR, LENGTH, seed=1)
    drawn = exp3.choose(0)
    exp3.observe(0, outcome(1 - drawn, [1.0, 1.0]))
    assert exp3.probabilities(0) == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize(
    ("options", "arms", "earned"),
    [
        ({}, PAIR, (24 / 3) / (8 / 2)),  # against no speculation
        ({}, (SHORT, LONG), 3.0 * 2 / 3),  # no arm without a draft: the first one's seconds stand in
        (LENGTH, PAIR, 3.0),
    ],
)
def test_rewards(options: dict[str, Any], arms: tuple[Arm, ...], earned: float) -> None:
    assert UCBSpec(arms, options).reward(outcome(1, [8.0, 24.0], 8, [2.0, 3.0])) == pytest.approx(earned)


def test_rewards_stay_in_their_range() -> None:
    cheap, dear = outcome(1, [1.0, 3.0], 1, [9.0, 1.0]), outcome(1, [1.0, 1.0], 1, [1.0, 1e9])
    assert UCBSpec(PAIR).reward(cheap) == 3.0 and UCBSpec(PAIR).reward(dear) == pytest.approx(0.0, abs=1e-6)
    assert UCBSpec(PAIR, LENGTH).reward(outcome(0, [0.5, 1.0])) == 1.0


@pytest.fixture
def no_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandits, "EPSILON", 0.0)


@pytest.mark.usefixtures("no_chance")
def test_beg_mab_plays_the_highest_median_of_tokens_per_second() -> None:
    beg = BegMab(PAIR)
    for emitted in (1.0, 1.0, 90.0):  # highest mean, lower median
        beg.observe(0, outcome(0, [emitted, 0.0], 4, [2.0, 2.0]))
    assert beg.choose(0) == 1  # never played
    beg.observe(0, outcome(1, [0.0, 2.0], 4, [2.0, 2.0]))
    assert beg.choose(0) == 1
    beg.observe(0, outcome(0, [90.0, 0.0], 4, [2.0, 2.0]))
    assert beg.choose(0) == 0  # (1 + 90) / 2 = 45.5


@pytest.mark.usefixtures("no_chance")
def test_beg_mab_is_paid_in_measured_seconds() -> None:
    """By the cost model the short draft is twice as fast as none, by the clock it is half as fast."""
    beg = BegMab(PAIR)
    for arm, measured in ((0, 1.0), (1, 4.0)):
        beg.observe(0, Outcome(arm, 1, np.array([1.0, 2.0]), np.array([1.0, 1.0]), measured))
    assert beg.state()["buckets"]["0"] == {"0": [1.0], "1": [0.5]} and beg.choose(0) == 0


@pytest.mark.parametrize("strategy", [UCBSpec, EXP3Spec])
def test_goodput_is_paid_in_measured_seconds(strategy: type[UCBSpec | EXP3Spec]) -> None:
    paid = Outcome(1, 8, np.array([8.0, 16.0]), np.array([2.0, 3.0]), 4.0)
    assert strategy(PAIR).reward(paid) == pytest.approx(2.0 * 2.0 / 4.0)
    assert strategy(PAIR, LENGTH).reward(paid) == 2.0, "the paper's reward knows no seconds"


@pytest.mark.usefixtures("no_chance")
def test_beg_mab_forgets_what_left_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandits, "WINDOW", 3)
    beg = BegMab(PAIR)
    beg.observe(0, outcome(1, [0.0, 5.0]))
    for emitted in (9.0, 9.0, 9.0, 1.0, 1.0):
        beg.observe(0, outcome(0, [emitted, 0.0]))
    assert beg.choose(0) == 1
    assert beg.state()["buckets"]["0"]["0"] == [9.0, 1.0, 1.0]


def test_beg_mab_explores_with_probability_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandits, "EPSILON", 0.3)
    beg = BegMab((NONE, SHORT, LONG), seed=2)
    for played, emitted in enumerate((1.0, 3.0, 2.0)):
        beg.observe(0, outcome(played, [emitted] * 3))
    plays = np.bincount([beg.choose(0) for _ in range(4000)], minlength=3) / 4000
    assert plays == pytest.approx([0.1, 0.8, 0.1], abs=0.03)  # five standard deviations


def test_beg_mab_keeps_to_the_set_of_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandits, "EPSILON", 1.0)
    beg = BegMab((NONE, SHORT, LONG), {"sets": {1: [4], 8: [2, 4], 16: [0]}})
    assert {beg.choose(0) for _ in range(50)} == {2}
    assert {beg.choose(3) for _ in range(50)} == {1, 2}
    assert {beg.choose(3 + 16) for _ in range(50)} == {1, 2}  # a longer context, the same batch
    assert {beg.choose(9) for _ in range(50)} == {0}


@pytest.mark.parametrize("p", [0.0, 0.05, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("k", [1, 4, 8])
def test_acceptance_is_found_from_the_mean_accepted_length(p: float, k: int) -> None:
    mean = float(k) if p == 1.0 else p * (1 - p**k) / (1 - p)
    assert acceptance(mean, k) == pytest.approx(p, abs=1e-6)


def test_thompson_posterior() -> None:
    ts = Thompson(PAIR)
    ts.observe(0, outcome(1, [4.0, 7.0], 4))
    # 3 of 8 tokens accepted: p + p^2 = 3/4, p = 1/2, so 4 (1 - p^2) = 3 requests met a rejection
    alpha, beta = ts.posterior(0)
    assert (alpha[1], beta[1]) == pytest.approx((4.0, 4.0), abs=1e-6)
    ts.observe(0, outcome(0, [4.0, 0.0], 4))
    assert ts.posterior(0)[0][1] == pytest.approx(4.0, abs=1e-6)  # no speculation tells nothing
    ts = Thompson(PAIR)
    ts.observe(0, outcome(1, [1.0, 3.0]))
    assert [x[1] for x in ts.posterior(0)] == pytest.approx([3.0, 1.0])  # all accepted, nothing rejected


def test_thompson_finds_theta_from_any_length() -> None:
    env = Environment(np.full((300, 1), 0.8), seed=3)
    for arm in (1, 4):
        ts = Thompson(LENGTHS)
        for t in range(env.steps):
            ts.observe(0, env.step(t, arm))
        alpha, beta = (x[1] for x in ts.posterior(0))
        assert alpha / (alpha + beta) == pytest.approx(0.8, abs=0.02)


def test_thompson_weighs_tokens_against_seconds() -> None:
    assert Thompson((NONE, SHORT, LONG)).choose(0) == 2  # knows no seconds yet
    for seconds, best in (([1.0, 1.1, 1.2], 2), ([1.0, 1.1, 9.0], 1), ([1.0, 9.0, 9.0], 0)):
        ts = Thompson((NONE, SHORT, LONG))
        ts.observe(0, outcome(2, [100.0, 0.0, 100.0 * float(expected(np.array(0.8), np.array(4.0)))], 100, seconds))
        assert {ts.choose(0) for _ in range(20)} == {best}


# ---- behaviour


@pytest.mark.parametrize("name", ["ucbspec", "exp3spec", "thompson"])
def test_regret_is_sublinear_where_nothing_changes(name: str) -> None:
    """Regret per step of 4000 steps below a fifth of that of the first 200, mean of three seeds."""
    arms, rates = [Arm((who,), 3) for who in "abc"], [0.5, 0.9, 0.3]
    early = late = 0.0
    for seed in range(3):
        env = Environment(np.tile(rates, (4000, 1)), arms, batch=1, seed=seed)
        regret = play(make(name, arms, LENGTH if name != "thompson" else {}, seed), env).regret
        early += regret[199] / 200
        late += regret[-1] / 4000
    assert late < 0.2 * early


def test_epsilon_greedy_loses_what_it_explores() -> None:
    env = stationary(3000, seed=4)
    run = play(make("beg_mab", LENGTHS, {}, 4), env)
    best = int(env.optimal()[0])
    assert (run.plays[500:] == best).mean() == pytest.approx(0.92, abs=0.03)


def test_an_adversary_that_knows_ucbspec_harms_exp3spec_less() -> None:
    for seed in range(4):
        env = adversarial(4000, seed=seed, block=1)
        fixed = env.throughput(np.full(env.steps, env.best_fixed()))
        ucb, exp3 = (play(make(n, env.arms, {}, seed), env).throughput for n in ("ucbspec", "exp3spec"))
        assert ucb < 0.75 * fixed and exp3 > 0.85 * fixed


@pytest.mark.parametrize("name", NAMES)
def test_buckets_learn_apart_and_weights_that_move_change_nothing(name: str) -> None:
    strategy, env = make(name, LENGTHS, {}, 5), stationary(60, seed=5)
    play(strategy, env, bucket=-3)
    before = strategy.state()
    strategy.changed()
    play(strategy, env, bucket=37)
    assert set(strategy.state()["buckets"]) == {"-3", "37"}
    assert strategy.state()["buckets"]["-3"] == before["buckets"]["-3"]


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_decides_all(name: str) -> None:
    env = stationary(200, seed=6)
    first, second = (play(make(name, LENGTHS, {}, 6), env).plays for _ in range(2))
    assert (first == second).all()


# ---- state


def resumed(name: str, strategy: Strategy) -> Strategy:
    other = make(name, LENGTHS, {}, 99)
    other.restore(json.loads(json.dumps(strategy.state(), sort_keys=True, allow_nan=False)))
    return other


@pytest.mark.parametrize("name", NAMES)
def test_state_survives_json(name: str) -> None:
    strategy, env = make(name, LENGTHS, {}, 7), stationary(150, seed=7)
    play(strategy, env, bucket=2)
    other = resumed(name, strategy)
    assert other.state() == strategy.state()
    strategy.rng, other.rng = np.random.default_rng(8), np.random.default_rng(8)
    more = swap(150, seed=8)
    assert (play(strategy, more, bucket=2).plays == play(other, more, bucket=2).plays).all()
    assert resumed(name, make(name, LENGTHS)).state()["buckets"] == {}


@pytest.mark.parametrize("name", NAMES)
def test_state_of_another_strategy_is_refused(name: str) -> None:
    strategy = make(name, LENGTHS)
    play(strategy, stationary(20))
    state = strategy.state()
    with pytest.raises(ValueError, match="arms"):
        make(name, LENGTHS[:3]).restore(state)
    key = next(iter(state["buckets"]["0"]))
    for wrong in ([math.nan] * 5, [-1.0] * 5, [[1.0] * 5], 3.0):
        with pytest.raises(ValueError, match="cannot be"):
            make(name, LENGTHS).restore({**state, "buckets": {"0": {**state["buckets"]["0"], key: wrong}}})
    with pytest.raises(ValueError, match="cannot be"):
        make(name, LENGTHS).restore({**state, "buckets": {"0": {}}})


# ---- the environments themselves


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_environments_keep_their_word(name: str) -> None:
    env = ENVIRONMENTS[name](600, 9)
    assert np.abs(env.emitted.mean(0) / env.expected.mean(0) - 1.0).max() < 0.12
    oracle = env.optimal()
    assert (env.rates()[np.arange(600), oracle] == env.rates().max(1)).all()
    ks = [a.k for a in env.arms]
    if len({a.drafters for a in env.arms if a.k}) == 1:  # coupled: a longer draft never emits less, nor much more
        assert (np.diff(env.emitted, axis=1) >= 0).all()
        assert (np.diff(env.emitted, axis=1) <= env.batch * np.diff(ks)).all()
    assert env.throughput(oracle) >= 0.98 * env.throughput(np.full(600, env.best_fixed()))
    run = play(make("beg_mab", env.arms), env, steps=50)
    assert run.regret.shape == (50,) and (np.diff(run.regret) >= -1e-9).all()


def test_the_benchmark_writes_every_strategy(tmp_path: Path) -> None:
    result = json.loads(benchmark.run(quick=True, out=tmp_path / "b.json").read_text())
    assert set(result["environments"]) == set(ENVIRONMENTS)
    for row in result["environments"].values():
        assert set(row) == {"static best", "hedge", *NAMES}
        assert all(0.3 < r["share"]["median"] <= 1.2 and r["share"]["n"] >= 10 for r in row.values())
