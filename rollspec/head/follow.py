"""Follows a store of drafter versions that several engines share: one of them tries a version, the others wait for it.

A thread looks into the store every `POLL_SECONDS`, decides with `drafter_online.shared_canary`, and has the swapper do
it: with a canary where this engine tries, without one where another's verdict is known. Files are read and written on
this thread only; the engine's own never waits for the store. An engine may come and go at any time: a canary that it
leaves, or dies in, passes to the next one.

A store that cannot be read or written leaves the engine with the drafter that it has; the fault is recorded and
logged once.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drafter_online.errors import DrafterError
from drafter_online.shared_canary import LEASE_SECONDS, Decision, SharedCanary
from drafter_online.versions import Versions
from rollspec.head.swap import Swapper
from rollspec.log_once import LogOnce

logger = logging.getLogger("rollspec")

POLL_SECONDS = 1.0
"""Between two looks into the store; a claim's beat is as often."""

STALL_SECONDS = 60.0
"""A canary that scores no draft for so long is given back: another engine may have the traffic to judge."""


class Follower:
    """One engine's part in the fleet's canary.

    Args:
        working: whether the engine has requests; only then it offers to try a version.
        fault: called with the cause when the store fails.
        replica: a name that no other engine has; made up if not given.
    """

    def __init__(
        self,
        swapper: Swapper,
        folder: Path,
        working: Callable[[], bool],
        fault: Callable[[str], None],
        replica: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.swapper = swapper
        self.store = Versions(folder)
        self.replica = replica or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self.counts = {"tried": 0, "taken": 0, "back": 0, "given_back": 0, "unusable": 0}
        self.last = Decision("none")
        self._canaries = SharedCanary(self.store, self.replica, lease_seconds=LEASE_SECONDS, clock=clock)
        self._working, self._fault, self._clock = working, fault, clock
        self._offered: Decision | None = None  # what the swapper was given and has not finished
        self._before: dict[str, Any] = {}  # the swapper's `last` at that time: it makes a new one for each swap
        self._progress: tuple[int, float] = (-1, 0.0)  # drafts scored, and since when
        self._unusable: set[int] = set()  # here; other engines may differ
        self._log_once = LogOnce()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to follow, on a thread that nothing waits for."""
        self._thread = threading.Thread(target=self._run, name="rollspec-follow", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; a canary is given back."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(2 * POLL_SECONDS)

    def info(self) -> dict[str, Any]:
        """What this engine does about versions."""
        d = self.last
        return {"replica": self.replica, "action": d.action, "version": d.version, "reason": d.reason, **self.counts}

    def _run(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            self.tick()
        self._canaries.release()

    def tick(self) -> None:
        """One look. Never raises."""
        try:
            if self._offered is not None:
                self._watch(self._offered)
            elif not self.swapper.busy:
                self._act(self._canaries.decide(self.swapper.version, willing=self._working()))
        except Exception as e:  # whatever it is: the engine keeps the drafter it has
            cause = str(e) if isinstance(e, DrafterError) else f"{type(e).__name__}: {e}"
            self._fault(f"drafter versions: {cause}")
            self._log_once(cause, "rollspec: the store of drafter versions cannot be followed at present (%s).", cause)

    def _act(self, d: Decision) -> None:
        self.last = d
        if d.action in ("none", "wait") or (d.action == "take" and d.version in self._unusable):
            return
        if d.action == "try":
            self.counts["tried"] += 1
            self._progress = (-1, self._clock())
        folder = None if d.version is None else self.store.path(d.version)
        self._offered, self._before = d, self.swapper.last
        self.swapper.offer(folder, canary=d.action == "try", back=d.action == "back")

    def _watch(self, d: Decision) -> None:
        """Watch an offer until the swapper is done with it."""
        trying = d.action == "try"
        if trying and not self._working() and self.swapper.withdraw():
            # The engine has nothing to do: when it has, there may be a newer version, or another has tried this one.
            self._offered = None
            self.counts["given_back"] += 1
            self._canaries.release()
            return
        if not trying and self._replaced(d):
            return
        alone = not trying or self._canaries.beat()
        last = self.swapper.last
        refused = last.get("refused")
        if self.swapper.busy or last is self._before or (trying and refused is None and "verdict" not in last):
            if trying and alone:
                self._stalled()
            return
        self._offered = None
        if not trying:
            self.counts["taken" if d.action == "take" else "back"] += refused is None
            if refused is not None and d.version is not None:
                self.counts["unusable"] += 1
                self._unusable.add(d.version)
            return
        if self._canaries.trying is None:
            return  # given back, or gone from the store, meanwhile; the swapper's record says the rest
        if refused is not None:
            self._canaries.conclude("refused", refused)
            return
        verdict = last["verdict"]
        counts = self._canaries.conclude(verdict, str(last.get("reason", "")))
        if counts != verdict:
            logger.warning(
                "rollspec: drafter version %s was promoted here and rolled back by another engine; it goes.", d.version
            )

    def _replaced(self, d: Decision) -> bool:
        """Whether an offer that no step has taken up gave way to a newer promoted version: the store keeps that one
        only, and an engine between two rollouts takes no step for long.
        """
        newer = self._canaries.decide(self.swapper.version, willing=False)
        if newer.action not in ("take", "back") or newer.version == d.version or not self.swapper.withdraw():
            return False
        self._offered = None
        self._act(newer)
        return True

    def _stalled(self) -> None:
        """Give the canary back when it scores no drafts; it continues here, and its verdict is recorded."""
        seen = getattr(self.swapper.canary, "seen", -1)
        now = self._clock()
        if seen != self._progress[0]:
            self._progress = (seen, now)
        elif now - self._progress[1] >= STALL_SECONDS:
            self.counts["given_back"] += 1
            self._canaries.release()
