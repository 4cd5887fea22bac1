"""The tuner and the ledger: decisions, counterfactuals, and what each arm would have cost."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from step_world import C0, C1, random_texts

from rollspec import RollspecConfig
from rollspec.config import TuningConfig
from rollspec.errors import ConfigError
from rollspec.step import DraftEngine
from rollspec.tuning.cost import CostModel
from rollspec.tuning.regret import TIMED, Ledger, without_drafts
from rollspec.tuning.strategy import Outcome
from rollspec.tuning.tuner import Rows, Tuner, arms_of

pytestmark = pytest.mark.usefixtures("steady_clock")


def tuner(k_max: int = 16, **settings: Any) -> Tuner:
    t = Tuner(TuningConfig(**settings), k_max, ("suffix",))
    t.cost = CostModel(C0, C1)
    return t


def settled(t: Tuner, batch: int, p: float, steps: int = 400, seed: int = 0, offer: int = 16) -> list[int]:
    """Play `steps` steps of drafts accepted with probability `p` per token; the K of the second half."""
    rng = np.random.default_rng(seed)
    ks = []
    for _ in range(steps):
        plan = t.plan(batch, 0.0)
        rows = len(range(0, batch, plan.watch or 1))
        accepted = np.minimum(rng.geometric(1 - p, rows) - 1, offer)
        t.observe(plan, batch, 0.0, Rows([offer] * rows, accepted.tolist()))
        ks.append(plan.k)
    return ks[steps // 2 :]


def test_arms_of_a_configuration() -> None:
    assert [a.name for a in arms_of(TuningConfig(), 6, ("suffix",))] == [
        "none",
        "suffix:1",
        "suffix:2",
        "suffix:4",
        "suffix:6",
    ]
    assert [a.k for a in arms_of(TuningConfig(arms=(5, 3)), 8, ("suffix",))] == [0, 3, 5]
    assert [a.name for a in arms_of(TuningConfig(), 6, ())] == ["none"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"tuning.arms": [2, 99]}, "99, which is not between 0 and proposal.k_max = 16"),
        ({"tuning.arms": []}, "at least 1 item"),
        ({"tuning.arms": [2, 2]}, "each draft length once"),
        ({"tuning.arms": [-1]}, "-1, which is not between"),
        ({"tuning.strategy": "hedg"}, "tuning.strategy"),
        ({"tuning.strategy": "table"}, "needs tuning.options.table"),
        ({"tuning.options": {"half_life": 0}}, "unknown key 'tuning.options.half_life' (value 0) in the overrides"),
        ({"tuning": {"strategy": "table", "options": {"table": {}}}}, "tuning.options.table = {} cannot be used"),
        ({"tuning.strategy": "table", "tuning.options.table": {4: 3}}, "tuning.options.table asks for K = 3"),
        ({"tuning.strategy": "beg_mab", "tuning.options.sets": {4: [3]}}, "tuning.options.sets asks for K = 3"),
        (
            {"tuning.strategy": "beg_mab", "tuning.options.sets": {4: []}},
            "must name a draft length for every batch size",
        ),
        ({"tuning.strategy": "beg_mab", "tuning.options.sets": 4}, "tuning.options.sets = 4 cannot be used"),
        ({"proposal.budget.length_weight": -1}, "proposal.budget.length_weight = -1"),
    ],
)
def test_bad_settings_get_one_sentence_at_the_start(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as e:
        RollspecConfig.load("default", overrides=given, env={})
    assert says in str(e.value) and str(e.value).count("rollspec:") == 1


@pytest.mark.parametrize(("strategy", "plays"), [("hedge", True), ("ucbspec", False), ("static", False)])
def test_a_step_without_drafts_is_priced_by_playing_it_where_drafts_always_pay(strategy: str, plays: bool) -> None:
    t = tuner(strategy=strategy, arms=(0, 4))
    without = 0.0
    for _ in range(600):
        plan = t.plan(8, 0.0)
        tokens = 8 * (1 + plan.k)
        t.cost.observe(tokens, 0.008 + 1e-4 * tokens + 0.003 * (plan.k > 0), 0.0, 8)
        rows = len(range(0, 8, plan.watch or 1))
        t.observe(plan, 8, 0.0, Rows([4] * rows, [3] * rows))
        without += not plan.k
    assert (t.plays[t.none] == 4 * 3) == plays  # after 16, 276 and 536 steps
    if plays:
        assert without == 12 and t.cost.seconds(8) == pytest.approx(0.0088, rel=0.02)


def test_an_engine_that_was_asked_to_draft_always_does() -> None:
    assert 0 not in settled(tuner(arms=(2, 4)), 4, 0.9)


def test_draft_length_follows_batch_and_acceptance() -> None:
    t = tuner()
    assert np.median(settled(t, 1, 0.9)) >= 8
    assert np.median(settled(t, 64, 0.3)) == 0
    assert 2 <= np.median(settled(t, 64, 0.95)) <= 8
    assert np.median(settled(t, 1, 0.9, 60)) >= 8, "what batch 1 learned is still there"


def test_a_batch_size_not_seen_before_starts_from_what_the_others_learned() -> None:
    t = tuner()
    settled(t, 32, 0.9)
    first = t.plan(2, 0.0)
    assert first.k >= 4
    t = tuner()
    settled(t, 2, 0.3)
    assert t.plan(64, 0.0).k <= 1


def test_long_contexts_are_a_bucket_of_their_own() -> None:
    t = tuner()
    assert t.plan(8, 8 * 1000).bucket == t.plan(8, 8 * 4000).bucket == 3
    assert t.plan(8, 8 * 5000).bucket == 3 + 16 and t.plan(8, 8 * 70_000).bucket == 3 + 48


def test_counterfactuals_of_a_chain() -> None:
    """Offered 5 and 2 tokens, accepted 3 and 2, and one that outlived what is known after 1 of 4."""
    t = tuner(strategy="static", arms=(4,))
    seen: list[Outcome] = []
    t.strategy.observe = lambda bucket, outcome: seen.append(outcome)  # type: ignore[method-assign]
    t.arms = arms_of(TuningConfig(), 16, ("suffix",))
    t.ks, t._index = np.array([a.k for a in t.arms]), list(range(len(t.arms)))
    t._emitted, t._verified, t.ledger = np.ones(6), np.zeros(6), Ledger(t.arms)
    t.observe(t.plan(3, 0.0), 3, 0.0, Rows([5, 2, 4], [3, 2, 1], [(2, [0.8, 0.4, 0.2, 0.1])]))
    emitted, seconds = seen[0].emitted, seen[0].seconds
    more = [0.0, 0.0, 0.4 / 0.8, (0.4 + 0.2 + 0.1) / 0.8, (0.4 + 0.2 + 0.1) / 0.8, (0.4 + 0.2 + 0.1) / 0.8]
    known = [0, 1 + 1 + 1, 2 + 2 + 1, 3 + 2 + 1, 3 + 2 + 1, 3 + 2 + 1]
    assert emitted == pytest.approx(3 + np.array(known) + np.array(more))
    tokens = 3 + np.array([0, 3, 6, 4 + 2 + 4, 5 + 2 + 4, 5 + 2 + 4])
    assert seconds == pytest.approx(C0 + C1 * tokens)


def test_the_host_is_part_of_what_an_arm_costs() -> None:
    """Drafts that pay on the accelerator, and not if finding them takes as long as they save."""
    t = tuner()
    assert np.median(settled(t, 8, 0.8)) > 0
    t = tuner()
    for _ in range(2000):
        t.host(8 * 0.01, 8, True)
        t.host(8 * 1e-6, 8, False)
    assert np.median(settled(t, 8, 0.8)) == 0


def test_a_first_step_that_warms_caches_up_keeps_no_arm_from_being_played() -> None:
    """It drafts for two requests and takes three hundred milliseconds; those after it take half of one."""
    t = tuner()
    t.host(0.3, 2, True)
    for _ in range(3):
        t.host(5e-4, 8, True)
    assert np.median(settled(t, 8, 0.8)) > 0
    t.host(0.3, 8, True)
    assert np.median(settled(t, 8, 0.8)) > 0, "one that stalls is clipped"


def test_nothing_is_decided_by_a_clock() -> None:
    """Two tuners that learn the same decide the same: a rank that repeats the calls reaches the same plans."""
    a, b = tuner(), tuner()
    assert settled(a, 8, 0.7) == settled(b, 8, 0.7)


def test_a_strategy_learns_what_the_step_took_by_the_clock() -> None:
    """Drafting for it and the head's passes included; not where prompts were computed or nothing was timed."""
    over = {"tuning.strategy": "ucbspec", "proposal.drafters": ["eagle3"], "proposal.head.model": "x"}
    p = DraftEngine(RollspecConfig.load("default", overrides=over, env={}), 4096, "eagle3")
    measured: list[float | None] = []
    modelled: list[float] = []

    def observe(bucket: int, outcome: Outcome) -> None:
        measured.append(outcome.measured)
        modelled.append(float(outcome.seconds[outcome.played]))

    p.tuner.strategy.observe = observe  # type: ignore[method-assign]
    p.begin("r", [1, 2, 3], 4000)

    def step(**timed: Any) -> None:
        if timed:
            p.timed(1, batch=1, **timed)
        p.prepare(["r"], [[5]], {})
        p.passed(1, 7.0, 1)
        p.complete([[5]], [[0.5]])

    for _ in range(10):
        step(decode_only=True, seconds=0.5)
    assert measured[:6] == pytest.approx(modelled[:6]), "costs that are not fitted have no scale of their own"
    measured.clear()
    step(decode_only=True, seconds=2.0)
    step(decode_only=False, seconds=2.0)
    step()
    assert measured[0] == pytest.approx(9.0, abs=0.1) and measured[1:] == [None, None]
    p.tuner.strategy.measures = True  # type: ignore[misc]
    step(decode_only=False, seconds=2.0)
    assert len(measured) == 3


def test_ledger_replays_settings() -> None:
    arms = arms_of(TuningConfig(arms=(0, 2, 4)), 16, ("suffix",))
    cost, ledger = CostModel(C0, C1), Ledger(arms)
    one = Outcome(0, 1, np.array([1.0, 2.0, 3.0]), np.array([0.010, 0.011, 0.012]))
    big = Outcome(1, 64, np.array([64.0, 70.0, 71.0]), np.array([0.016, 0.020, 0.030]))
    for _ in range(10):
        ledger.add(0, one, 0.0, cost)
        ledger.add(6, big, 0.0, cost)
    m = ledger.close([], lambda batch, context: 0.012)
    assert m["played"] == pytest.approx(10 * (0.010 + 0.020))
    assert m["fixed/none"] == pytest.approx(10 * (0.010 + 70 * 0.016 / 64))
    assert m["fixed/suffix:4"] == pytest.approx(10 * (0.012 / 3 + 70 * 0.030 / 71))
    assert m["oracle"] == pytest.approx(10 * (0.012 / 3 + 70 * 0.016 / 64))
    assert m["clairvoyant"] == pytest.approx(m["oracle"]), "the same outcome each time"
    each = {b: min(cost.seconds(b * n) / (b * n) for n in range(1, 6)) for b in (1, 64)}
    assert m["perfect"] == pytest.approx(10 * (each[1] + 70 * each[64]))
    assert ledger.close([], lambda batch, context: 0.012) == {}


def test_regret_by_the_clock_corrects_each_arm_by_its_own_steps() -> None:
    """The model prefers drafts; the clock says that a step with them takes twice what the model thinks."""
    arms = arms_of(TuningConfig(arms=(0, 2)), 16, ("suffix",))
    cost, ledger = CostModel(C0, C1), Ledger(arms)

    def steps(n: int, played: int, measured: float | None) -> None:
        for _ in range(n):
            ledger.add(0, Outcome(played, 1, np.array([1.0, 1.5]), np.array([0.010, 0.012]), measured), 0.0, cost)

    steps(40, 1, 0.024)
    steps(TIMED, 0, 0.010)
    m = ledger.close([], lambda batch, context: 0.010)
    tokens = 40 * 1.5 + TIMED
    assert m["oracle"] == pytest.approx(tokens * 0.012 / 1.5), "by the model drafts are best"
    assert m["clock/oracle"] == pytest.approx(tokens * 0.010), "by the clock they are not"
    assert m["clock/played"] == pytest.approx(40 * 0.024 + TIMED * 0.010)

    steps(40, 1, 0.024)
    steps(TIMED - 1, 0, 0.010)  # too few to say what a step without drafts takes: it is scaled as the bucket is
    m = ledger.close([], lambda batch, context: 0.010)
    tokens = 40 * 1.5 + TIMED - 1
    assert m["clock/oracle"] == pytest.approx(tokens * 0.024 / 1.5)

    steps(40, 1, None)
    assert not any(name.startswith("clock/") for name in ledger.close([], lambda batch, context: 0.010))


def test_without_drafts_responses_of_one_length_end_together() -> None:
    assert without_drafts([(0, 10), (0, 4), (0, 10)]) == {3: 4, 2: 6}
    assert without_drafts([(0, 4), (0, 10), (1, 6)]) == {2: 10}, "the third had waited for a place"
    assert without_drafts([(3, 5), (7, 2)]) == {1: 7}, "what they waited for had ended before the last drain"
    assert without_drafts([]) == {}

    arms = arms_of(TuningConfig(arms=(0, 2)), 16, ("suffix",))
    cost, ledger = CostModel(C0, C1), Ledger(arms)

    def emit(batch: int, tokens: float) -> None:
        ledger.add(0, Outcome(1, batch, np.array([batch, tokens]), np.array([0.01, 0.02])), 100.0 * batch, cost)

    # Two of four tokens each: with drafts one ends after a step, the other is alone for three more.
    emit(2, 5.0)
    for _ in range(3):
        emit(1, 1.0)
    ledger.end(0, 4)
    m = ledger.close([(0, 4)], lambda batch, context: {(2, 200.0): 0.012}[batch, context])
    assert m["played"] == pytest.approx(0.08)
    assert m["fixed/none"] == pytest.approx(4 * 0.012), "four steps of two"
    assert m["oracle"] == m["clairvoyant"] == m["fixed/none"], "no arm of a bucket is better than no speculation"
    assert ledger.ended == 0 and ledger.close([], lambda batch, context: 0.012) == {}


def test_an_engine_knows_what_its_responses_take_without_drafts() -> None:
    """What a request emitted before the last drain is not counted again."""
    p = DraftEngine(RollspecConfig.load("default", env={}), 4096)
    p.begin("a", [1, 2, 3], 500)
    p.begin("b", [1, 2, 3], 500)
    for t in range(4):
        p.step(["a", "b"], [[t], [t]], {})
    assert [r.decoded() for r in p.requests.values()] == [(0, 3), (0, 3)], "the first comes with the prompt"
    p.finish("b")
    p.begin("c", [1, 2, 3], 500)
    assert p.requests["c"].after == 1
    p.step(["a", "c"], [[5], [5]], {})
    assert p.drain().modelled["fixed/none"] > 0
    assert [r.decoded() for r in p.requests.values()] == [(0, 0), (0, 0)] and p.tuner.ledger.ended == 0


def test_where_nothing_pays_it_is_hardly_looked_at_until_the_weights_move() -> None:
    t = tuner()
    plans = []
    for _ in range(400):
        plan = t.plan(64, 0.0)
        plans.append(plan)
        if not plan.rest:
            rows = len(range(0, 64, plan.watch or 1))
            t.observe(plan, 64, 0.0, Rows([16] * rows, [0] * rows))
    late = plans[-80:]
    assert all(p.k == 0 for p in late)
    assert sum(not p.rest for p in late) == 10 and {p.steps for p in late} == {8}
    for i, p in enumerate(late[:-8]):  # what was said of the steps to come held
        assert [q.rest for q in late[i + 1 : i + 2 + p.ahead]] == [True] * p.ahead + [not p.rest]
    t.changed()
    assert not any(t.plan(64, 0.0).rest for _ in range(40)), "new weights are watched closely"


def test_what_is_said_while_the_tuner_rests_reaches_the_siblings() -> None:
    p = DraftEngine(RollspecConfig.load("default", env={}), 4096)
    p.begin("a", [1, 2, 3], 500)
    p.begin("b", [1, 2, 3], 500)
    said = random_texts(1, 40, 50)[0]
    plan = p.tuner.plan
    p.tuner.plan = lambda batch, context_tokens: dataclasses.replace(plan(batch, context_tokens), rest=True)  # type: ignore[method-assign]
    for token in said:
        assert p.step(["a"], [[token]], {}) == [[]]
    p.tuner.plan = plan  # type: ignore[method-assign]
    p.finish("a")
    p.step(["b"], [said[:1]], {})
    p.step(["b"], [said[1:3]], {})
    assert p.requests["b"].lookup.draft.token_ids[:4] == said[3:7]
