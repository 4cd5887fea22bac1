"""When training may use the machine: a pure rule, and the accounting of idle time found and used.

A step runs only while the engine is awake, has no request running or waiting, and the trainer of the policy is not in
its update phase (it needs the memory, and the policy is changing). It is asked again before every training-time-test
step: a request that arrives waits for a part of one micro-step at most.

    idle = Idle()
    report = idle.tick(state, trainer.micro_step)       # does nothing unless `state()` allows it

The clock and the state are given from outside: nothing here knows an engine. Nothing here can end a step that hangs,
either: `StepWatch` makes one visible.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")

Why = Literal["idle", "asleep", "busy", "updating", "settling", "stopped"]


LEAST_SECONDS = 120.0
"""No step counts as hanging before this: the first one loads libraries and may compile."""

TIMES = 20.0
"""A step hangs once it takes so many times the mean of those before it."""

MAX_FAILURES = 3
"""Micro-steps that raise, in a row, before training is stopped."""


class StepWatch:
    """How long the running micro-step has been running, and whether that is a hang.

    The trainer's thread wraps each micro-step; any other thread may ask:

        with watch:
            trainer.micro_step(...)
        watch.age, watch.hangs          # on another thread
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began: float | None = None
        self._steps, self._seconds = 0, 0.0

    def __enter__(self) -> StepWatch:
        self._began = self._clock()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._began is not None:
            self._steps += 1
            self._seconds += self._clock() - self._began
        self._began = None

    @property
    def age(self) -> float:
        """Seconds that the running step has taken so far; 0 while none runs."""
        began = self._began  # another thread may end the step meanwhile
        return 0.0 if began is None else max(0.0, self._clock() - began)

    @property
    def bound(self) -> float:
        """Seconds after which a step hangs."""
        return max(LEAST_SECONDS, TIMES * self._seconds / max(1, self._steps))

    @property
    def hangs(self) -> str | None:
        """One sentence without its full stop, None while all is well."""
        age = self.age
        if age <= self.bound:
            return None
        return f"a training step of the drafter has been running for {age:.0f} s, more than {self.bound:.0f} s"


@dataclass(frozen=True)
class EngineState:
    """What an engine is doing now."""

    awake: bool = True  # its memory is in place (not put to sleep)
    running: int = 0  # requests, in the batch or queued
    updating: bool = False  # the policy is being trained, or its weights are being sent
    since: float | None = None  # when what forbids a step began, by the clock of `Idle`; None: when it was noticed


@dataclass
class IdleCounts:
    """Seconds and events since the start."""

    available: float = 0.0  # the engine was idle (awake, nothing to do, no update), whether or not a step ran
    used: float = 0.0  # micro-steps that did their work
    wasted: float = 0.0  # micro-steps that were preempted or skipped, or failed
    steps: int = 0
    preempted: int = 0
    failed: int = 0
    latencies: list[float] = field(default_factory=list)  # seconds from the wish to preempt to the engine's turn

    @property
    def latency_p99(self) -> float:
        """99th percentile of the latest latencies (nearest rank), 0 where no step was preempted."""
        ordered = sorted(self.latencies)
        return ordered[math.ceil(0.99 * len(ordered)) - 1] if ordered else 0.0

    @property
    def step_seconds(self) -> float:
        """Mean duration of the micro-steps that did their work, 0 before the first."""
        return self.used / self.steps if self.steps else 0.0


@dataclass
class IdleCost:
    """What training costs the engine: seconds in which its steps shared the machine with a micro-step that had yet to
    give way, as a share of the seconds that it computed. Both fade with the time that it computes.
    """

    LIMIT = 0.03  # share; above it training begins later in an idle stretch, so fewer micro-steps are preempted
    HALF_LIFE = 60.0  # seconds of engine time
    LEAST = 1.0  # seconds of engine time before there is a share
    MOST = 10.0  # seconds of an idle stretch in which training waits

    busy: float = 0.0
    delayed: float = 0.0

    def step(self, seconds: float) -> None:
        """The engine made a step."""
        kept = 0.5 ** (seconds / self.HALF_LIFE)
        self.busy = kept * self.busy + seconds
        self.delayed *= kept

    def delay(self, seconds: float) -> None:
        """A micro-step took so long to give way."""
        self.delayed += seconds

    @property
    def share(self) -> float:
        """Of the engine's time; an upper bound, as the two may have computed side by side."""
        return self.delayed / self.busy if self.busy > self.LEAST else 0.0

    def settle(self, seconds: float) -> float:
        """How long the engine must have been idle before training, where it costs little `seconds`."""
        return seconds if self.share <= self.LIMIT else min(self.MOST, seconds * (self.share / self.LIMIT) ** 4)


class Idle(Generic[T]):
    """Decides and accounts. One thread calls `tick`; `state` is asked often and must be cheap.

    Args:
        clock: seconds, monotonic.
        settle_seconds: the engine must have been idle this long: gaps between requests are not idleness.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, settle_seconds: float = 0.02) -> None:
        self.settle_seconds = settle_seconds
        self.counts = IdleCounts()
        self.cost = IdleCost()
        self.watch = StepWatch(clock)
        self.stopped: str | None = None  # why training was given up, None while it runs
        self._clock = clock
        self._idle_since: float | None = None
        self._seen: float | None = None  # when `available` was last brought up to date
        self._failures = 0

    def decide(self, state: EngineState, now: float | None = None) -> Why:
        """`idle` when a step may start now, else what forbids it. Brings the accounting up to date."""
        now = self._clock() if now is None else now
        reason = _forbids(state)
        if self._seen is not None and self._idle_since is not None:
            self.counts.available += now - self._seen
        self._seen = now
        if reason is not None:
            self._idle_since = None
            return reason
        if self._idle_since is None:
            self._idle_since = now
        if self.stopped is not None:
            return "stopped"
        if now - self._idle_since < self.cost.settle(self.settle_seconds):
            return "settling"
        return "idle"

    def tick(self, state: Callable[[], EngineState], step: Callable[[Callable[[], bool]], T]) -> T | None:
        """Run one micro-step if it may run.

        Args:
            state: what the engine is doing now.
            step: a micro-step that takes the question "must I stop?" (`Trainer.micro_step`). What it raises is counted
                and logged; after `MAX_FAILURES` in a row training is stopped and `stopped` says why.

        Returns:
            what the step returned; None when none ran, or it raised.
        """
        if self.decide(state()) != "idle":
            return None
        asked: list[float] = []

        def must_stop() -> bool:
            now = state()
            if _forbids(now) is None:
                return False
            asked.append(self._clock() if now.since is None else now.since)
            return True

        start = self._clock()
        result: T | None = None
        failure: Exception | None = None
        try:
            with self.watch:
                result = step(must_stop)
        except Exception as e:  # training must not end the engine: counted, logged, and given up after a few
            failure = e
        end = self._clock()
        self.decide(state(), end)
        worked = getattr(result, "skipped", None) is None  # a report of `Trainer.micro_step` says why it did nothing
        self._account(end - start, end - asked[0] if asked else None, failure, worked)
        return result

    def _account(self, seconds: float, latency: float | None, failure: Exception | None, worked: bool) -> None:
        c = self.counts
        if failure is not None:
            c.failed += 1
            c.wasted += seconds
            self._failures += 1
            if self._failures == 1:
                log.warning("drafter-online: a training step failed (%s: %s)", type(failure).__name__, failure)
            if self._failures >= MAX_FAILURES:
                self.stopped = f"{self._failures} training steps in a row failed, the last with {failure!r}"
                log.error("drafter-online: training is stopped: %s; drafting continues as it is", self.stopped)
            return
        self._failures = 0
        if latency is not None:
            c.preempted += 1
            c.wasted += seconds
            self.cost.delay(latency)
            c.latencies.append(latency)
            del c.latencies[:-1000]
            return
        if not worked:
            c.wasted += seconds
            return
        c.steps += 1
        c.used += seconds


def _forbids(state: EngineState) -> Why | None:
    if not state.awake:
        return "asleep"
    if state.updating:
        return "updating"
    if state.running:
        return "busy"
    return None
