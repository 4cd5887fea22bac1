from __future__ import annotations

from collections.abc import Callable

import pytest

from drafter_online.idle import Idle, StepWatch


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def idle(**kw: float) -> tuple[Idle[str], Clock]:
    clock = Clock()
    return Idle(clock, **{"settle_seconds": 1.0, **kw}), clock  # type: ignore[arg-type]


def unwanted() -> None:
    """Nothing else wants the machine."""


def test_a_gap_between_requests_is_not_idleness() -> None:
    rule, clock = idle()
    for t, wanted, may in ((0.0, False, False), (0.9, False, False), (0.95, True, False), (1.1, False, False)):
        clock.now = t
        assert rule.allows(wanted) == may
    clock.now = 2.2
    assert rule.allows(False) and not rule.allows(True)


def test_seconds_available_and_used() -> None:
    rule, clock = idle()

    def step(_: Callable[[], bool]) -> str:
        clock.now += 2.0
        return "done"

    assert rule.tick(clock, step) is None
    clock.now = 10.0
    assert rule.tick(unwanted, step) is None  # settling; idle from here
    clock.now = 13.0
    assert rule.tick(unwanted, step) == "done"
    clock.now = 16.0
    rule.allows(True)  # it fell asleep somewhere before: counted as idle until seen
    clock.now = 50.0
    rule.allows(True)
    assert rule.counts.available == pytest.approx(6.0) and rule.counts.used == pytest.approx(2.0)
    assert rule.counts.steps == 1 and rule.counts.wasted == 0


def test_preemption_within_a_step_and_its_latency() -> None:
    rule, clock = idle(settle_seconds=0.0)
    wanted: float | None = None

    def step(must_stop: Callable[[], bool]) -> str:
        nonlocal wanted
        clock.now += 1.0
        assert not must_stop()
        clock.now += 0.5
        wanted = clock.now
        assert must_stop()
        clock.now += 0.25  # what it takes to get out
        return "preempted"

    assert rule.tick(lambda: wanted, step) == "preempted"
    c = rule.counts
    assert (c.steps, c.latencies) == (0, [0.25])
    assert c.wasted == pytest.approx(1.75) and c.used == 0
    assert rule.tick(lambda: wanted, step) is None


def test_latency_counts_from_when_the_engine_wanted_the_machine() -> None:
    """And not from when the step next asked."""
    rule, clock = idle(settle_seconds=0.0)
    wanted: float | None = None

    def step(must_stop: Callable[[], bool]) -> str:
        nonlocal wanted
        wanted = clock.now
        clock.now += 0.5
        assert must_stop()
        clock.now += 0.25
        return "preempted"

    rule.tick(lambda: wanted, step)
    assert rule.counts.latencies == [0.75]


def test_the_99th_percentile_of_latencies_and_the_mean_step() -> None:
    rule, clock = idle(settle_seconds=0.0)
    assert (rule.counts.latency_p99, rule.counts.step_seconds) == (0.0, 0.0)
    rule.counts.latencies = [i / 100 for i in range(200, 0, -1)]
    assert rule.counts.latency_p99 == 1.98 and max(rule.counts.latencies) == 2.0
    rule.counts.latencies = [0.25]
    assert rule.counts.latency_p99 == 0.25

    def step(_: Callable[[], bool]) -> str:
        clock.now += 3.0
        return "done"

    for _ in range(2):
        rule.tick(unwanted, step)
    assert rule.counts.step_seconds == 3.0 and rule.counts.steps == 2


def test_a_step_that_hangs_is_seen_from_outside() -> None:
    clock = Clock()
    watch = StepWatch(clock)
    assert watch.age == 0.0 and watch.hangs is None
    with watch:
        clock.now += 119.0
        assert watch.age == 119.0 and watch.hangs is None
        clock.now += 2.0
        assert "has been running for 121 s, more than 120 s" in str(watch.hangs)
    assert watch.age == 0.0 and watch.hangs is None
    watch.__enter__()
    clock.now += 1.0
    watch.__exit__(RuntimeError, RuntimeError("planted"), None)
    assert watch.bound == 20 * 122.0 / 2 and watch.age == 0.0, "slow steps are given longer"


def test_a_step_that_fails_is_wasted_time() -> None:
    rule, clock = idle(settle_seconds=0.0)

    def crash(_: Callable[[], bool]) -> str:
        clock.now += 2.0
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        rule.tick(unwanted, crash)
    assert rule.counts.wasted == 2.0 and rule.counts.steps == 0 and rule.watch.age == 0.0
    assert rule.tick(unwanted, lambda _: "fine") == "fine"
    assert rule.sums == {"idle_seconds": 2.0, "used_seconds": 0.0, "wasted_seconds": 2.0}
    assert rule.levels["preempt_seconds"] == rule.levels["idle_cost"] == 0.0


def test_training_that_costs_the_job_too_much_waits_longer() -> None:
    rule, clock = idle(settle_seconds=0.1)
    assert rule.cost.share == 0.0 and rule.cost.settle(0.1) == 0.1, "nothing is known yet"
    for _ in range(100):
        rule.cost.step(0.1)
    rule.cost.delayed += 0.2
    assert rule.cost.share == pytest.approx(0.2 / rule.cost.busy) and rule.cost.settle(0.1) == 0.1
    rule.cost.delayed += 0.6
    assert rule.cost.share > 2 * rule.cost.LIMIT and 1.6 < rule.cost.settle(0.1) <= rule.cost.MOST
    assert not rule.allows(False)
    clock.now += 1.0
    assert not rule.allows(False)
    clock.now += 10.0
    assert rule.allows(False)
    for _ in range(2000):  # fewer were preempted since
        rule.cost.step(0.1)
    assert rule.cost.settle(0.1) == 0.1
