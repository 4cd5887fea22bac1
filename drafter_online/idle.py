"""When training may use the machine: a pure rule, and the accounting of idle time found and used.

A step runs only while nothing else wants the machine: the engine is awake and has no request, and the trainer of the
policy is not in its update phase (it needs the memory, and the policy is changing). It is asked again before every
training-time-test step: a request that arrives waits for a part of one micro-step at most.

    idle = Idle()
    report = idle.tick(wanted, trainer.micro_step)       # does nothing unless `wanted()` is None

Nothing here knows an engine. Nothing here can end a step that hangs, either: `StepWatch` makes one visible.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

LEAST_SECONDS = 120.0
"""No step counts as hanging before this: the first one loads libraries and may compile."""

TIMES = 20.0
"""A step hangs once it takes so many times the mean of those before it."""


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

    def __enter__(self) -> None:
        self._began = self._clock()

    def __exit__(self, *exc: object) -> None:
        self._steps += 1
        self._seconds += self.age
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


@dataclass
class IdleCounts:
    """Seconds and events since the start."""

    available: float = 0.0  # nothing else wanted the machine, whether or not a step ran
    used: float = 0.0  # micro-steps that did their work
    wasted: float = 0.0  # micro-steps that were preempted or skipped, or failed
    steps: int = 0
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
    seen: float | None = None  # seconds that the engine had computed at the last look

    def at(self, seconds: float) -> None:
        """The engine has computed so many seconds in all."""
        if self.seen is not None:
            self.step(max(0.0, seconds - self.seen))
        self.seen = seconds

    def step(self, seconds: float) -> None:
        """The engine made a step."""
        kept = 0.5 ** (seconds / self.HALF_LIFE)
        self.busy = kept * self.busy + seconds
        self.delayed *= kept

    @property
    def share(self) -> float:
        """Of the engine's time; an upper bound, as the two may have computed side by side."""
        return self.delayed / self.busy if self.busy > self.LEAST else 0.0

    def settle(self, seconds: float) -> float:
        """How long the engine must have been idle before training, where it costs little `seconds`."""
        return seconds if self.share <= self.LIMIT else min(self.MOST, seconds * (self.share / self.LIMIT) ** 4)


class Idle(Generic[T]):
    """Decides and accounts; on one thread.

    Args:
        clock: seconds, monotonic.
        settle_seconds: the machine must have been idle this long: gaps between requests are not idleness.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, settle_seconds: float = 0.02) -> None:
        self.settle_seconds = settle_seconds
        self.counts = IdleCounts()
        self.cost = IdleCost()
        self.watch = StepWatch(clock)
        self._clock = clock
        self._idle_since: float | None = None
        self._seen = 0.0  # when `available` was last brought up to date

    @property
    def sums(self) -> dict[str, float]:
        """What only grows, by the names of `rollspec.telemetry.metrics`."""
        c = self.counts
        return {"idle_seconds": c.available, "used_seconds": c.used, "wasted_seconds": c.wasted}

    @property
    def levels(self) -> dict[str, float]:
        """What the engine waited, how long a micro-step takes, and what training costs, by the same names."""
        c = self.counts
        return {
            "preempt_seconds": max(c.latencies, default=0.0),
            "preempt_p99_seconds": c.latency_p99,
            "micro_step_seconds": c.step_seconds,
            "idle_cost": self.cost.share,
        }

    def allows(self, wanted: bool) -> bool:
        """Whether a step may start now; `wanted`: something else wants the machine. Keeps the accounts."""
        now = self._clock()
        if self._idle_since is not None:
            self.counts.available += now - self._seen
        self._seen = now
        if wanted:
            self._idle_since = None
            return False
        if self._idle_since is None:
            self._idle_since = now
        return now - self._idle_since >= self.cost.settle(self.settle_seconds)

    def tick(self, wanted: Callable[[], float | None], step: Callable[[Callable[[], bool]], T]) -> T | None:
        """Run one micro-step if it may run, and return what it did; None when none ran.

        Args:
            wanted: since when something else wants the machine, by the clock; None: nothing does. Asked often.
            step: takes the question "must I stop?" (`Trainer.micro_step`). What it raises is raised, as wasted time.
        """
        if not self.allows(wanted() is not None):
            return None
        asked: list[float] = []

        def must_stop() -> bool:
            if (since := wanted()) is not None:
                asked.append(since)
            return since is not None

        start = self._clock()
        result: T | None = None
        try:
            with self.watch:
                result = step(must_stop)
        finally:
            self._account(start, asked, result)
        return result

    def _account(self, start: float, asked: list[float], result: T | None) -> None:
        end = self._clock()
        self.allows(bool(asked))
        c = self.counts
        if asked:
            self.cost.delayed += end - asked[0]
            c.latencies = [*c.latencies[-999:], end - asked[0]]
        # A report of `Trainer.micro_step` says why it did nothing.
        if result is None or asked or getattr(result, "skipped", None) is not None:
            c.wasted += end - start
        else:
            c.steps += 1
            c.used += end - start
