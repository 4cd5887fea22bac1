"""What is counted of drafting: tokens drafted and accepted, by drafter and position, and the host's time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from rollspec.drafting.requests import Request, Step, still_thinks
from rollspec.telemetry.engine_stats import EngineStats
from rollspec.tuning.tuner import Tuner


class Timer:
    """Adds up the seconds spent in `with timer:`."""

    __slots__ = ("_began", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.seconds += time.perf_counter() - self._began


class Counters:
    """Counts of one engine since the last drain."""

    def __init__(self) -> None:
        self.stats = EngineStats()
        self.drafting = Timer()  # all of drafting on the host since the last step, `begin` and `finish` included
        self.tuning = Timer()  # the part of it that decides how much to draft
        self._before_step = 0.0  # drafting seconds up to the last step
        self._before_drain = (0.0, 0.0)  # of both timers
        self.peak = 0  # largest batch of this rollout round, for the tail

    def step(self, seconds: float, batch: int) -> None:
        """An engine step of `batch` requests took `seconds`."""
        self.stats.steps += 1
        self.stats.step_seconds += seconds
        if 4 * batch <= self.peak:
            self.stats.tail_seconds += seconds

    def drafted(self, step: Step) -> float:
        """A step's drafts are handed over; the host's seconds for them."""
        batch = len(step.running)
        self.stats.requests += batch
        self.peak = max(self.peak, batch)
        before, self._before_step = self._before_step, self.drafting.seconds
        return self._before_step - before

    def verified(self, source: str, expected: Sequence[float], verified: int, accepted: int) -> None:
        """Of a request's draft by `source`, `verified` tokens were verified and `accepted` of them accepted.

        `expected`: cumulative acceptance per token, as it was calibrated when drafted.
        """
        stats = self.stats
        accepted = min(accepted, verified)
        stats.verified += 1
        stats.drafted += verified
        stats.accepted += accepted
        predicted = sum(expected[:verified])
        stats.predicted += predicted
        stats.predicted_by[source] = stats.predicted_by.get(source, 0.0) + predicted
        row = stats.by_source.setdefault(source, [0, 0, 0])
        row[0] += 1
        row[1] += verified
        row[2] += accepted
        positions = stats.by_position
        while len(positions) < verified:
            positions.append([0, 0])
        for i in range(min(accepted + 1, verified)):
            positions[i][0] += 1
            positions[i][1] += i < accepted

    def thought(self, r: Request, around: tuple[int, int]) -> None:
        """A step's tokens count as thinking, or as none, by where their request was when the step began."""
        row = self.stats.thinking[r.thinks]
        for i, n in enumerate((1, len(r.emitted), r.verified, min(r.accepted, r.verified))):
            row[i] += n
        r.thinks = still_thinks(r.emitted, around, r.thinks)

    def finished(self, r: Request) -> None:
        """A request ended: what it repeated of its old response."""
        m = r.suffix
        if m.replay is not None and not r.private:
            counts = zip(self.stats.reuse, m.reused(len(r.output)), m.counted, strict=True)
            self.stats.reuse = [total + now - before for total, now, before in counts]

    def drain(self, tuner: Tuner, running: Iterable[Request]) -> EngineStats:
        """The counts since the last call, with the tuner's."""
        out, self.stats = self.stats, EngineStats()
        before, self._before_drain = self._before_drain, (self.drafting.seconds, self.tuning.seconds)
        out.propose_seconds, out.tuner_seconds = (b - a for a, b in zip(before, self._before_drain, strict=True))
        out.modelled = tuner.modelled([r.decoded() for r in running])
        out.plays = {a.name: int(n) for a, n in zip(tuner.arms, tuner.plays, strict=True) if n}
        tuner.plays[:] = 0
        out.cost_error = tuner.cost.error
        out.cost_skipped, tuner.cost.skipped = tuner.cost.skipped, 0
        out.alarms, tuner.guard.alarms = tuner.guard.alarms, 0
        out.recoveries, tuner.guard.recoveries = tuner.guard.recoveries, 0
        out.drafters_off = tuner.guard.off
        return out
