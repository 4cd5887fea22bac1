"""Which engine gets which version: one has a new one on canary, the others follow when it is promoted.

    release = Release(store, engines, publish_first, patience=60.0)
    release.published(7)
    release.offer(engine)            # (7, True): for one engine, as a canary; (6, False): what was promoted; None
    release.judge("engine-1", verdict)   # its verdict, recorded in the store

An engine that rolled a version back, or refused it, is not offered it again. A canary without a verdict within
`patience` seconds (no traffic, or gone) is joined by another one. Engines take nothing older than what they run, so
going back means publishing the old weights under a new number.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

from drafter_online.engines import ConnectedEngine, Engines, VersionVerdict
from drafter_online.errors import DrafterError, VersionError
from drafter_online.versions import Version, Versions

log = logging.getLogger(__name__)

AGAIN_SECONDS = 3.0  # between two offers to one engine


class Release:
    """State over all engines. Thread-safe.

    Args:
        store: verdicts are recorded there; what was promoted, and what has no verdict, are read from it at the start.
        first: publishes the weights that engines were started with.
        patience: seconds that a canary may take before another engine is asked as well.
    """

    def __init__(self, store: Versions, engines: Engines, first: Callable[[], int], patience: float) -> None:
        self.store, self.engines, self.first, self.patience = store, engines, first, patience
        self.trusted: set[int] = set()  # promoted by hand: without a canary
        self.canaries: dict[str, float] = {}  # engine -> since when it has the candidate on canary
        self.rolled_back = 0
        self.problem: str | None = None  # why a verdict was not recorded
        self.offered = 0  # newest version that an engine may run, though it has not reported it yet
        self._bad: dict[str, set[int]] = {}  # engine -> versions that it must not run
        self._lock = threading.RLock()
        self.reread()

    def reread(self) -> None:
        """The store is another one now: forget the verdicts on the old one's versions, not what engines run."""
        with self._lock:
            self.current = self.store.promoted()
            # Under a number that engines have run they may run something else: no verdict of theirs is on this one.
            self.candidate = self.store.candidate(after=max(self.current or 0, self.running))
            """The version that waits for its verdict."""
            self.store.on_canary = self.candidate
            self.trusted.clear()
            self.canaries.clear()
            self._bad.clear()

    @contextlib.contextmanager
    def replacing(self) -> Iterator[None]:
        """The store is replaced meanwhile: verdicts on the old one's versions are not recorded in the new one."""
        with self._lock:
            waiting, self.candidate = self.candidate, None
        try:
            yield
        except BaseException:
            with self._lock:
                self.candidate = waiting
            raise
        self.reread()

    def published(self, number: int) -> None:
        """A version is there to be tried; one that was not decided upon is left behind."""
        with self._lock:
            # Kept by the store until the next one takes its place: what is decided by hand publishes copies meanwhile,
            # and an engine may still be fetching it.
            self.candidate = self.store.on_canary = number
            self.canaries.clear()

    def offer(self, engine: ConnectedEngine) -> tuple[int, bool] | None:
        """What this engine should take now, and whether as a canary; None: nothing."""
        with self._lock:
            status, now = engine.status, time.monotonic()
            if status.busy or now - engine.offered < AGAIN_SECONDS:
                return None
            bad = self._bad.get(engine.name, set())
            number = self.current
            patient = all(now - since > self.patience for since in self.canaries.values())
            if self.candidate is not None and self.candidate not in bad and (engine.name in self.canaries or patient):
                self.canaries.setdefault(engine.name, now)
                number = self.candidate
            if number is None or number in bad or number <= status.version:
                return None
            engine.offered = now
            self.offered = max(self.offered, number)
            return number, number not in self.trusted

    def left(self, name: str) -> None:
        """An engine is gone: its canary will have no verdict."""
        with self._lock:
            self.canaries.pop(name, None)

    def judge(self, name: str, found: VersionVerdict) -> bool:
        """Record an engine's verdict. Returns whether it is new."""
        with self._lock:
            good = found.verdict == "promoted"
            if not good:
                bad = self._bad.setdefault(name, set())
                if found.version in bad:
                    return False
                bad.add(found.version)
                bad.difference_update(sorted(bad)[:-64])
            if found.version != self.candidate:
                return not good
            try:
                self.store.record(found.version, found.verdict, f"{name}: {found.reason}")
                self.problem = None
            except DrafterError as e:  # the verdict stands, though it is forgotten at a restart
                self.problem = str(e)
                log.warning("%s", e)
            self._decided(found.version, good)
            return True

    def _decided(self, number: int, good: bool) -> None:
        if good:
            self.current = number
        else:
            self.rolled_back += 1
        if self.candidate is not None and (self.candidate == number or (good and self.candidate < number)):
            self.candidate = None
        self.canaries.clear()  # of a newer one, too: it waits until engines run this one

    # ---- by hand ----------------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """The newest version that an engine may run."""
        return max(self.engines.newest, self.offered)

    def promote(self, number: int, reason: str = "by hand") -> int:
        """Have every engine run version `number`; returns the number under which they will.

        Raises:
            VersionError: it is missing or damaged, or the store cannot be written.
        """
        version = self.store.load(number)
        with self._lock:
            if number < self.running:
                number = self._again(version)
            self.store.record(number, "promoted", reason)
            self.trusted.add(number)
            self._decided(number, True)
            return number

    def rollback(self, number: int) -> int | None:
        """Have no engine run version `number`; returns what they will run, None where they need not change.

        Raises:
            VersionError: it is not in the store, or the store cannot be written.
        """
        if number not in self.store.numbers():
            raise VersionError(f"version {number} is not in the store; it has {self.store.numbers()}.")
        with self._lock:
            self.store.record(number, "rolled_back", "by hand")
            if self.candidate == number:
                self.canaries.clear()
                self.candidate = None
            self.rolled_back += 1
            before = self.store.promoted()
            if self.running < number:  # no engine runs it
                self.current = before
                return None
            version = None
            if before is not None:
                with contextlib.suppress(VersionError):  # what was promoted is damaged
                    version = self.store.load(before)
            again = self.first() if version is None else self._again(version)
            self.store.record(again, "promoted", f"by hand: version {number} was rolled back")
            self.trusted.add(again)
            self._decided(again, True)
            return again

    def _again(self, version: Version) -> int:
        """The same weights under a new number."""
        m = version.manifest
        return self.store.publish(
            version.tensors,
            version.config,
            base=m.base,
            target_version=m.target_version,
            kind=m.kind,
            parent=m.version,
            provenance={**m.provenance, "copy_of": m.version},
        )
