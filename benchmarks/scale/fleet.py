"""Versions through a fleet: published every so often, tried by one replica, taken by the others, at their own polls.

The rules are those of `drafter_online.release` (test_scale.py holds the two against each other): a version goes to
whichever replica reports first while none has it on canary; that of a replica that dies passes on when it has been
silent for `lease`; the newest promoted version is taken; what a canary rolls back no other replica sees. Replicas
report every `poll` seconds, each at a phase of its own.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from benchmarks.scale.costs import Measured, World, version_bytes
from benchmarks.scale.events import Clock
from benchmarks.scale.spread import Kind, Spread

SAMPLE_SECONDS = 2.0  # between two looks at how old everything is


@dataclass(frozen=True)
class Fleet:
    """What is simulated. All times in seconds; `life` None: replicas stay."""

    replicas: int
    kind: Kind
    copy: float  # of a version over a replica's link
    sender: float  # over the trainer's
    readers: int
    load: float  # verifying and reading a version that is there
    publish: float
    publish_every: float
    canary: float
    bad: float
    poll: float
    lease: float
    life: float | None = None
    crashes: float = 0.0

    @classmethod
    def of(cls, replicas: int, kind: Kind, w: World, m: Measured, churn: bool = False) -> Fleet:
        """A fleet of the assumed cluster with the measured costs."""
        size = version_bytes(w)
        return cls(
            replicas=replicas,
            kind=kind,
            copy=size / w.replica_link,
            sender=size / min(w.trainer_link, w.replica_link),
            readers=max(1, int(w.store_links // w.replica_link)),
            load=size * m.load_seconds_per_byte,
            publish=size * m.publish_seconds_per_byte,
            publish_every=w.publish_every,
            canary=w.canary_drafts / w.drafts_per_second,
            bad=w.bad_versions,
            poll=w.poll,
            lease=w.lease,
            life=w.life if churn else None,
            crashes=w.crashes,
        )


@dataclass(eq=False)
class Replica:
    """One engine. `phase`: of its polls."""

    phase: float
    born: float
    version: int = 0
    busy: bool = False
    alive: bool = True
    looking: float = -1.0  # time of its next poll; -1: none is scheduled
    settled: bool = False  # it ran a promoted version once


@dataclass
class _State:
    published: dict[int, float] = field(default_factory=lambda: {0: 0.0})
    verdicts: dict[int, bool] = field(default_factory=dict)
    decided: dict[int, float] = field(default_factory=dict)
    holder: Replica | None = None
    canaries: int = 0
    died: int = 0
    last_taken: dict[int, float] = field(default_factory=dict)  # version -> when the last of these had it:
    takers: dict[int, int] = field(default_factory=dict)  # replicas that were there at its verdict
    joined: list[float] = field(default_factory=list)
    ages: list[float] = field(default_factory=list)
    oldest: list[float] = field(default_factory=list)


def simulate(f: Fleet, seconds: float, seed: int) -> dict[str, float]:
    """Run a fleet. Returns means over versions, replicas and time; see `_summary`."""
    return _Simulation(f, seed).run(seconds)


class _Simulation:
    def __init__(self, f: Fleet, seed: int) -> None:
        self.f = f
        self.rng = random.Random(seed)
        self.clock = Clock()
        self.spread = Spread(self.clock, f.kind, f.copy, f.readers, f.sender)
        self.state = _State()
        self.replicas: list[Replica] = []
        self._number = 0

    def run(self, seconds: float) -> dict[str, float]:
        for _ in range(self.f.replicas):
            self._join()
        self.clock.after(self.f.publish, self._publish)
        self.clock.after(2 * self.f.publish_every, self._sample)
        self.clock.run(seconds)
        return self._summary()

    # ---- replicas come and go

    def _join(self) -> None:
        r = Replica(self.rng.uniform(0, self.f.poll), self.clock.now)
        self.replicas.append(r)
        if self.f.life is not None:
            self.clock.after(self.rng.expovariate(1 / self.f.life), lambda: self._leave(r))
        self._look_soon(r)

    def _leave(self, r: Replica) -> None:
        r.alive = False
        self.replicas.remove(r)
        self.spread.left(r.version)
        if self.state.holder is r:
            if self.rng.random() < self.f.crashes:
                self.state.died += 1
                self.clock.after(self.f.lease, lambda: self._freed(r))
            else:
                self._freed(r)
        self._join()  # another takes its place

    def _freed(self, r: Replica) -> None:
        if self.state.holder is r:
            self.state.holder = None
            self._notify()

    # ---- polls

    def _notify(self) -> None:
        """Something changed in the store: every replica sees it at its next poll."""
        for r in self.replicas:
            self._look_soon(r)

    def _look_soon(self, r: Replica) -> None:
        now, poll = self.clock.now, self.f.poll
        at = now if poll <= 0 else r.phase + math.ceil((now - r.phase) / poll) * poll
        if r.looking >= now or r.busy or not r.alive:
            return
        r.looking = at
        self.clock.after(at - now, lambda: self._look(r))

    def _look(self, r: Replica) -> None:
        r.looking = -1.0
        if r.busy or not r.alive:
            return
        s = self.state
        good = max((n for n, ok in s.verdicts.items() if ok), default=0)
        if good > r.version:
            self._fetch(r, good, lambda: self._took(r, good))
            return
        waiting = max((n for n in s.published if n not in s.verdicts and n > r.version), default=0)
        if waiting and s.holder is None:
            s.holder = r
            s.canaries += 1
            self._fetch(r, waiting, lambda: self.clock.after(self.f.canary, lambda: self._judged(r, waiting)))

    def _fetch(self, r: Replica, version: int, then: object) -> None:
        r.busy = True

        def there() -> None:
            self.clock.after(self.f.load, then)  # type: ignore[arg-type]

        self.spread.fetch(version, there)

    def _took(self, r: Replica, version: int) -> None:
        if not r.alive:
            return
        s = self.state
        if not r.settled and r.born > min(s.decided.values()):
            s.joined.append(self.clock.now - r.born)
        r.busy, r.version, r.settled = False, version, True
        if r.born <= s.decided[version]:
            s.takers[version] = s.takers.get(version, 0) + 1
            s.last_taken[version] = self.clock.now
        self._look_soon(r)

    # ---- versions

    def _publish(self) -> None:
        self._number += 1
        self.state.published[self._number] = self.clock.now
        self.clock.after(self.f.publish_every, self._publish)
        self._notify()

    def _judged(self, r: Replica, version: int) -> None:
        s = self.state
        if not r.alive or s.holder is not r:
            return
        s.holder, r.busy = None, False
        for n in s.published:  # what is older than a verdict needs none
            if 0 < n < version:
                s.verdicts.setdefault(n, False)
        s.verdicts[version] = self.rng.random() >= self.f.bad
        s.decided[version] = self.clock.now
        if s.verdicts[version]:
            r.version, r.settled = version, True
            s.takers[version] = s.takers.get(version, 0) + 1
            s.last_taken[version] = self.clock.now
        self._notify()

    # ---- what is seen

    def _sample(self) -> None:
        ages = [self.clock.now - self.state.published[r.version] for r in self.replicas if r.settled or not self.f.life]
        if ages:
            self.state.ages.append(sum(ages) / len(ages))
            self.state.oldest.append(max(ages))
        self.clock.after(SAMPLE_SECONDS, self._sample)

    def _summary(self) -> dict[str, float]:
        """`fan_out`: from a verdict to the last replica that was there then; `to_verdict`: from publication; `age`: of
        what a replica runs, since its publication; `reached`: share of the replicas that a promoted version reached;
        `joining`: from a replica's start to its first promoted version, of those that came when there was one.
        """
        s, f = self.state, self.f
        good = [n for n, ok in s.verdicts.items() if ok and n in s.decided]
        done = [n for n in good if n < max(good)] or good  # of the last one some are still on their way
        spread = [s.last_taken[n] - s.decided[n] for n in done]
        late = sorted(s.joined)
        return {
            "versions": float(self._number),
            "promoted": float(len(good)),
            "canaries": float(s.canaries),
            "died_on_canary": float(s.died),
            "to_verdict": _mean([s.decided[n] - s.published[n] for n in s.decided]),
            "fan_out": _mean(spread),
            "fan_out_longest": max(spread, default=0.0),
            "reached": _mean([min(1.0, s.takers[n] / f.replicas) for n in done]),
            "age": _mean(s.ages),
            "age_oldest": _mean(s.oldest),
            "joining": _mean(late),
            "copies": float(self.spread.copies),
        }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
