"""The guard, and what drafting costs over whole rollouts: broken drafters, unpredictable text, a moving batch."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
from step_world import random_texts, rollout

from rollspec import RollspecConfig
from rollspec.proposal.base import Draft
from rollspec.step import DraftEngine
from rollspec.tuning.guard import Guard

pytestmark = pytest.mark.usefixtures("steady_clock")


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
    """A drafter that answers as a broken one would, in place of the suffix drafter."""

    def __init__(self, tokens: Callable[[list[int], int], list[int]], sure: float = 0.95) -> None:
        self.tokens, self.sure = tokens, sure

    def __call__(self, groups: Any, contexts: list[list[int]], rooms: list[int]) -> list[Draft]:
        said = [self.tokens(context, k) for context, k in zip(contexts, rooms, strict=True)]
        return [Draft(t, [self.sure ** (i + 1) for i in range(len(t))], "group", 8) for t in said]


@pytest.fixture
def static() -> dict[str, Any]:
    return {"tuning.strategy": "static", "proposal.budget.rule": "fixed"}


FAULTS = {
    "garbage weights": lambda context, k: [random.Random(sum(context[-3:])).randrange(3, 60) for _ in range(k)],
    "another model": lambda context, k: [1000 + (t * 7) % 500 for t in context[-k:]],
    "all-zero logits": lambda context, k: [0] * k,
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("strategy", ["static", "hedge"])
def test_a_broken_drafter_costs_little_whatever_the_strategy(fault: str, strategy: str, static: dict[str, Any]) -> None:
    texts = random_texts(32, 600, 60)
    p = DraftEngine(RollspecConfig.load("default", overrides=static | {"tuning.strategy": strategy}, env={}), 4096)
    p.suffix.draft = Planted(FAULTS[fault])  # type: ignore[method-assign]
    seconds, plain = rollout(p, texts)
    s = p.drain()
    if strategy == "static":
        assert s.drafters_off == ["suffix@32"] and s.alarms == 1
        assert seconds < 1.6 * plain, "fifty steps at K = 16, and then none"
        without = static | {"tuning.guard.enabled": False}
        unguarded = DraftEngine(RollspecConfig.load("default", overrides=without, env={}), 4096)
        unguarded.suffix.draft = Planted(FAULTS[fault])  # type: ignore[method-assign]
        assert rollout(unguarded, texts)[0] > 3 * plain
    else:
        assert seconds < 1.04 * plain  # in real time: benchmarks/harm.py
    assert s.emitted == 32 * 600


def test_a_drafter_that_is_repaired_comes_back(static: dict[str, Any]) -> None:
    texts = random_texts(8, 1200, 60)
    p = DraftEngine(RollspecConfig.load("default", overrides=static, env={}), 4096)
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
    p = DraftEngine(RollspecConfig.load("default", env={}), 4096)
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
        p = DraftEngine(RollspecConfig.load("default", overrides=over, env={}), 4096)
        out, r = 0.0, random.Random(1)
        for version in range(3):
            p.set_version(version)
            out += rollout(p, [[t if r.random() > 0.12 else r.randrange(3, 60) for t in text] for text in base])[0]
        return out

    off = {"tuning.strategy": "static", "proposal.budget.rule": "fixed", "tuning.guard.enabled": False}
    statics = [total(off | {"tuning.arms": [k]}) for k in (0, 1, 2, 4, 8, 16)]
    assert total({}) < 0.97 * min(statics)
