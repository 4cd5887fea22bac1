"""The tuner, the guard, the ledger and the store: decisions, counterfactuals, faults, what is kept with the job."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollspec import RollspecConfig
from rollspec.config import TuningConfig
from rollspec.errors import ConfigError, HistoryError
from rollspec.proposal.base import Draft
from rollspec.step import Engine
from rollspec.tuning import store
from rollspec.tuning.cost import CostModel
from rollspec.tuning.guard import Guard
from rollspec.tuning.policy import Outcome
from rollspec.tuning.regret import Ledger
from rollspec.tuning.tuner import Tuner, arms_of

pytestmark = pytest.mark.usefixtures("steady_clock")

C0, C1 = 0.0085, 0.00013


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
        hits = np.minimum(rng.geometric(1 - p, rows) - 1, offer)
        t.observe(plan, batch, 0.0, [offer] * rows, hits.tolist())
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
        ({"tuning.arms": []}, "at least one"),
        ({"tuning.arms": [2, 2]}, "each draft length once"),
        ({"tuning.arms": [-1]}, "-1, which is not between"),
        ({"tuning.policy": "hedg"}, "tuning.policy"),
        ({"tuning.policy": "table"}, "needs tuning.options.table"),
        ({"tuning.options": {"half_life": 0}}, "'tuning.options.half_life' (value 0) in the overrides is gone"),
        ({"tuning": {"policy": "table", "options": {"table": {}}}}, "needs tuning.options.table"),
        ({"proposal.budget.length_weight": -1}, "proposal.budget.length_weight = -1"),
    ],
)
def test_bad_settings_get_one_sentence_at_the_start(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as e:
        RollspecConfig.load("default", overrides=given, env={})
    assert says in str(e.value) and str(e.value).count("rollspec:") == 1


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
    """Offered 5 and 2 tokens, hits 3 and 2, and one that outlived what is known after 1 of 4."""
    t = tuner(policy="static", arms=(4,))
    seen: list[Outcome] = []
    t.policy.observe = lambda bucket, outcome: seen.append(outcome)  # type: ignore[method-assign]
    t.arms = arms_of(TuningConfig(), 16, ("suffix",))
    t.ks, t._index = np.array([a.k for a in t.arms]), list(range(len(t.arms)))
    t._emitted, t._verified, t.ledger = np.ones(6), np.zeros(6), Ledger(t.arms)
    t.observe(t.plan(3, 0.0), 3, 0.0, [5, 2, 4], [3, 2, 1], [(2, [0.8, 0.4, 0.2, 0.1])])
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
    """Two tuners that are told the same decide the same: a rank that repeats the calls reaches the same plans."""
    a, b = tuner(), tuner()
    assert settled(a, 8, 0.7) == settled(b, 8, 0.7)


# ---- guard


def test_guard_switches_off_below_break_even_and_on_again(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard(patience=20)
    with caplog.at_level(logging.WARNING, logger="rollspec"):
        for _ in range(19):
            guard.observe("d", 3, 1.0, 2.0)
        assert guard.allows("d", 3), "not before it was patient"
        guard.observe("d", 3, 1.0, 2.0)
        assert not guard.allows("d", 3) and guard.allows("d", 0) and guard.allows("e", 3)
        assert guard.off == ["d@8"] and guard.alarms == 1
        for _ in range(200):
            guard.observe("d", 3, 2.1, 2.0)
        assert not guard.allows("d", 3), "just above break-even would flap"
        for _ in range(200):
            guard.observe("d", 3, 4.0, 2.0)
        assert guard.allows("d", 3) and guard.recoveries == 1
        for _ in range(200):
            guard.observe("d", 3, 1.0, 2.0)
    assert guard.alarms == 2
    assert len([r for r in caplog.records if "is off at a batch of about 8" in r.message]) == 1, "said once"
    guard.observe("d", 3, 1.0, 0.0)  # nothing was at stake


class Planted:
    """A drafter that answers as a broken one would, in place of the suffix trees."""

    def __init__(self, tokens: Callable[[list[int], int], list[int]], sure: float = 0.95) -> None:
        self.tokens, self.sure = tokens, sure

    def __call__(self, groups: Any, contexts: list[list[int]], rooms: list[int]) -> list[Draft]:
        said = [self.tokens(context, k) for context, k in zip(contexts, rooms, strict=True)]
        return [Draft(t, [self.sure ** (i + 1) for i in range(len(t))], "group", 8) for t in said]


def rollout(p: Engine, texts: list[list[int]], seed: int = 0) -> tuple[float, float]:
    """Decode fixed texts with exact verification and known step costs: seconds, and seconds without speculation."""
    rng = random.Random(seed)
    names = [f"{p.version}-{i}" for i in range(len(texts))]
    at, drafts = [0] * len(texts), [[] for _ in texts]  # type: list[int], list[list[int]]
    for name, text in zip(names, texts, strict=True):
        p.begin(name, [1, 2, 3], len(text))
    seconds = 0.0
    while live := [i for i in range(len(texts)) if at[i] < len(texts[i])]:
        new, scheduled = [], {}
        for i in live:
            n = 0
            while n < len(drafts[i]) and drafts[i][n] == texts[i][at[i] + n]:
                n += 1
            new.append(texts[i][at[i] : at[i] + n + 1])
            at[i] += n + 1
            scheduled[names[i]] = drafts[i]
        tokens = len(live) + sum(map(len, scheduled.values()))
        took = (C0 + C1 * tokens) * rng.lognormvariate(0, 0.02)
        seconds += took
        p.timed(tokens, True, took, len(live))
        out = p.step([names[i] for i in live], new, scheduled, float(sum(at)))
        for i, draft in zip(live, out, strict=True):
            drafts[i] = draft
    for name in names:
        p.finish(name)
    longest = max(map(len, texts))
    plain = sum(C0 + C1 * sum(len(t) > s for t in texts) for s in range(longest))
    return seconds, plain


def random_texts(batch: int, length: int, symbols: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 3 + symbols) for _ in range(length)] for _ in range(batch)]


@pytest.fixture
def static() -> dict[str, Any]:
    return {"tuning.policy": "static", "proposal.budget.policy": "fixed"}


FAULTS = {
    "garbage weights": lambda context, k: [random.Random(sum(context[-3:])).randrange(3, 60) for _ in range(k)],
    "another model": lambda context, k: [1000 + (t * 7) % 500 for t in context[-k:]],
    "all-zero logits": lambda context, k: [0] * k,
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("policy", ["static", "hedge"])
def test_a_broken_drafter_costs_little_whatever_the_policy(fault: str, policy: str, static: dict[str, Any]) -> None:
    texts = random_texts(32, 600, 60)
    p = Engine(RollspecConfig.load("default", overrides=static | {"tuning.policy": policy}, env={}), 4096)
    p.suffix.draft = Planted(FAULTS[fault])  # type: ignore[method-assign]
    seconds, plain = rollout(p, texts)
    s = p.drain()
    if policy == "static":
        assert s.drafters_off == ["suffix@32"] and s.alarms == 1
        assert seconds < 1.6 * plain, "fifty steps at K = 16, and then none"
        without = static | {"tuning.guard.enabled": False}
        unguarded = Engine(RollspecConfig.load("default", overrides=without, env={}), 4096)
        unguarded.suffix.draft = Planted(FAULTS[fault])  # type: ignore[method-assign]
        assert rollout(unguarded, texts)[0] > 3 * plain
    else:
        assert seconds < 1.04 * plain  # in real time: benchmarks/harm.py
    assert s.emitted == 32 * 600


def test_a_drafter_that_is_repaired_comes_back(static: dict[str, Any]) -> None:
    texts = random_texts(8, 1200, 60)
    p = Engine(RollspecConfig.load("default", overrides=static, env={}), 4096)
    p.suffix.draft = Planted(FAULTS["all-zero logits"])  # type: ignore[method-assign]
    rollout(p, texts)
    assert p.drain().drafters_off
    p.set_version(1)
    places = {tuple(t[i - 8 : i]): t[i : i + 16] for t in texts for i in range(8, len(t))}
    p.suffix.draft = Planted(lambda context, k: places.get(tuple(context[-8:]), [])[:k])  # type: ignore[method-assign]
    seconds, plain = rollout(p, texts)
    s = p.drain()
    assert s.recoveries == 1 and not s.drafters_off and seconds < 0.6 * plain


def test_unpredictable_text_costs_next_to_nothing() -> None:
    """No repeats to speak of, batch 64, learning included: what the engine computes, not host time."""
    p = Engine(RollspecConfig.load("default", env={}), 4096)
    seconds, plain = rollout(p, random_texts(64, 300, 200))
    assert seconds < 1.02 * plain
    s = p.drain()
    assert s.plays.get("none", 0) > 0.5 * s.steps
    assert s.requests == 64 * 300


def test_moving_batch_beats_every_static_length() -> None:
    """Lengths with a long tail, so that the batch falls from 64 to 1; the second epoch repeats most of the first."""
    rng = random.Random(0)
    base = [[rng.randrange(3, 60) for _ in range(min(512, int(40 * rng.paretovariate(1.2))))] for _ in range(64)]

    def total(over: dict[str, Any]) -> float:
        p = Engine(RollspecConfig.load("default", overrides=over, env={}), 4096)
        out, r = 0.0, random.Random(1)
        for version in range(3):
            p.set_version(version)
            out += rollout(p, [[t if r.random() > 0.12 else r.randrange(3, 60) for t in text] for text in base])[0]
        return out

    off = {"tuning.policy": "static", "proposal.budget.policy": "fixed", "tuning.guard.enabled": False}
    statics = [total(off | {"tuning.arms": [k]}) for k in (0, 1, 2, 4, 8, 16)]
    assert total({}) < 0.97 * min(statics)


def test_a_policy_is_told_what_the_step_took_by_the_clock() -> None:
    """Drafting for it and the head's passes included; not where prompts were computed or nothing was timed."""
    over = {"tuning.policy": "ucbspec", "proposal.drafters": ["eagle3"], "proposal.learned.model": "x"}
    p = Engine(RollspecConfig.load("default", overrides=over, env={}), 4096, "eagle3")
    told: list[float | None] = []
    modelled: list[float] = []

    def observe(bucket: int, outcome: Outcome) -> None:
        told.append(outcome.measured)
        modelled.append(float(outcome.seconds[outcome.played]))

    p.tuner.policy.observe = observe  # type: ignore[method-assign]
    p.begin("r", [1, 2, 3], 4000)

    def step(**timed: Any) -> None:
        if timed:
            p.timed(1, batch=1, **timed)
        p.prepare(["r"], [[5]], {})
        p.passed(1, 7.0, 1)
        p.complete([[5]], [[0.5]])

    for _ in range(10):
        step(decode_only=True, seconds=0.5)
    assert told[:6] == pytest.approx(modelled[:6]), "costs that are not fitted have no scale of their own"
    told.clear()
    step(decode_only=True, seconds=2.0)
    step(decode_only=False, seconds=2.0)
    step()
    assert told[0] == pytest.approx(9.0, abs=0.1) and told[1:] == [None, None]
    p.tuner.policy.measures = True  # type: ignore[misc]
    step(decode_only=False, seconds=2.0)
    assert len(told) == 3


# ---- ledger


def test_ledger_replays_settings() -> None:
    arms = arms_of(TuningConfig(arms=(0, 2, 4)), 16, ("suffix",))
    cost, ledger = CostModel(C0, C1), Ledger(arms)
    one = Outcome(0, 1, np.array([1.0, 2.0, 3.0]), np.array([0.010, 0.011, 0.012]))
    big = Outcome(1, 64, np.array([64.0, 70.0, 71.0]), np.array([0.016, 0.020, 0.030]))
    for _ in range(10):
        ledger.add(0, one, 0.0, cost)
        ledger.add(6, big, 0.0, cost)
    m = ledger.close()
    assert m["played"] == pytest.approx(10 * (0.010 + 0.020))
    assert m["fixed/none"] == pytest.approx(10 * (0.010 + 70 * 0.016 / 64))
    assert m["fixed/suffix:4"] == pytest.approx(10 * (0.012 / 3 + 70 * 0.030 / 71))
    assert m["oracle"] == pytest.approx(10 * (0.012 / 3 + 70 * 0.016 / 64))
    assert m["clairvoyant"] == pytest.approx(m["oracle"]), "the same outcome each time"
    each = {b: min(cost.seconds(b * n) / (b * n) for n in range(1, 6)) for b in (1, 64)}
    assert m["perfect"] == pytest.approx(10 * (each[1] + 70 * each[64]))
    assert ledger.close() == {}


# ---- store


MACHINE = {"device": "cpu x2", "layers": 4}


def learned() -> dict[str, Any]:
    p = Engine(RollspecConfig.load("default", env={}), 4096)
    rollout(p, random_texts(4, 200, 4))
    return p.learned()


def test_what_was_learned_survives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr("time.perf_counter", lambda: 1e-6 * next(ticks))  # the tuner counts its own time
    first = Engine(RollspecConfig.load("default", env={}), 4096)
    rollout(first, random_texts(4, 300, 1))  # all drafts are right: no two arms are alike
    store.save(tmp_path, first.learned(), MACHINE)
    found, problem = store.load(tmp_path, MACHINE)
    assert found is not None and problem is None
    again = Engine(RollspecConfig.load("default", env={}), 4096)
    again.relearn(found)
    then, now = (p.tuner.cost.seconds(20) for p in (first, again))
    assert now == pytest.approx(then, rel=0.05)
    assert again.learned()["confidence"] == first.learned()["confidence"]
    assert again.tuner.plan(4, 0.0).k == first.tuner.plan(4, 0.0).k


def test_another_machine_keeps_the_calibration_and_drops_the_costs(tmp_path: Path) -> None:
    store.save(tmp_path, learned(), MACHINE)
    found, problem = store.load(tmp_path, MACHINE | {"device": "cpu x64"})
    assert found is not None and "tuner" not in found and found["confidence"]
    assert problem is not None and "device = 'cpu x2' and this is 'cpu x64'" in problem
    p = Engine(RollspecConfig.load("default", env={}), 4096)
    p.relearn(found)
    assert not p.tuner.cost.fitted


def test_other_arms_keep_the_costs(tmp_path: Path) -> None:
    p = Engine(RollspecConfig.load("default", overrides={"proposal.k_max": 4}, env={}), 4096)
    p.relearn(learned())
    assert p.tuner.cost.fitted


@pytest.mark.parametrize("damage", ["truncated", "altered", "format", "not json", "numbers"])
def test_a_damaged_file_is_refused_and_set_aside(tmp_path: Path, damage: str) -> None:
    good = learned()
    path = store.save(tmp_path, good, MACHINE)
    text = path.read_text()
    if damage == "numbers":
        good["confidence"]["group"]["hits"][0] = -5.0
        store.save(tmp_path, good, MACHINE)
        found, _ = store.load(tmp_path, MACHINE)
        with pytest.raises(ValueError, match="numbers that cannot be"):
            Engine(RollspecConfig.load("default", env={}), 4096).relearn(found or {})
        return
    outer = json.loads(text)
    outer["body"] = outer["body"].replace("1", "2")
    path.write_text(
        {
            "truncated": text[:-9],
            "altered": json.dumps(outer),
            "format": text.replace(store.FORMAT, "other-1"),
            "not json": "[]",
        }[damage]
    )
    with pytest.raises(HistoryError, match="is refused") as e:
        store.load(tmp_path, MACHINE)
    assert str(tmp_path) in str(e.value) and list(tmp_path.glob("*.corrupt")) and not path.exists()
    assert store.load(tmp_path, MACHINE) == (None, None)


def test_a_folder_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HistoryError, match="cannot be written"):
        store.save(tmp_path / "file" / "sub", {}, MACHINE)


def test_where_nothing_pays_it_is_hardly_looked_at_until_the_weights_move() -> None:
    t = tuner()
    plans = []
    for _ in range(400):
        plan = t.plan(64, 0.0)
        plans.append(plan)
        if not plan.rest:
            rows = len(range(0, 64, plan.watch or 1))
            t.observe(plan, 64, 0.0, [16] * rows, [0] * rows)
    late = plans[-80:]
    assert all(p.k == 0 for p in late)
    assert sum(not p.rest for p in late) == 10 and {p.steps for p in late} == {8}
    t.changed()
    assert not any(t.plan(64, 0.0).rest for _ in range(40)), "new weights are watched closely"


def test_what_is_said_while_nobody_looks_reaches_the_siblings() -> None:
    p = Engine(RollspecConfig.load("default", env={}), 4096)
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
