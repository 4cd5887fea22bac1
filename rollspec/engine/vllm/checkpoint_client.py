"""What a worker asks of the drafter's daemon when the job writes a checkpoint, and when it goes on from one.

`save` waits for the answer, bounded; `load` does not: the daemon may still be starting, and takes the copy over before
it gets samples. The thread that has the connection sends and hears both.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drafter_online.link import Link

logger = logging.getLogger("rollspec")

SAVE_SECONDS = 15.0
"""How long a checkpoint waits for the daemon's part of it: trainers wait 30 s for their calls into the engine."""

LOAD_SECONDS = 300.0
"""How long a copy may wait for the daemon to start."""


@dataclass(eq=False)
class _Errand:
    number: int
    kind: str
    folder: Path
    until: float
    sent: bool = False
    done: bool = False
    ended: threading.Event = field(default_factory=threading.Event)


class CheckpointClient:
    """Of one connection. `fault` is told what could not be done, and why."""

    def __init__(self, fault: Callable[[str, str], None]) -> None:
        self._fault = fault
        self._open: dict[int, _Errand] = {}
        self._numbers = 0
        self._lock = threading.Lock()  # of the two above

    def save(self, folder: Path, away: str | None) -> bool:
        """Have the state copied to `folder`; whether it was. `away`: why the daemon cannot be asked."""
        if away is not None:
            self._fault("saving", away)
            return False
        try:
            folder.mkdir(parents=True, exist_ok=True)  # the daemon copies to what is there, so that both mean the same
        except OSError as e:
            self._fault("saving", str(e))
            return False
        errand = self._add("save", folder, SAVE_SECONDS)
        if not errand.ended.wait(SAVE_SECONDS) and self._close(errand) is not None:
            self._fault("saving", f"the daemon has not answered for {SAVE_SECONDS:g} s")
        if not errand.done:
            with contextlib.suppress(OSError):  # there is something in it
                folder.rmdir()
        return errand.done

    def load(self, folder: Path) -> None:
        """Have the state taken from `folder`, as soon as the daemon listens."""
        self._add("load", folder, LOAD_SECONDS)

    def send(self, link: Link) -> None:
        """On the connection's thread, while the daemon listens: ask what was not asked yet."""
        from drafter_online.wire import Message

        for e in self._list():
            if not e.sent:
                body = {"id": e.number, "folder": str(e.folder.resolve())}
                e.sent = link.send(Message(e.kind, body))  # type: ignore[arg-type]
        self._expire()

    def away(self, why: str) -> None:
        """The daemon does not listen: a checkpoint must not wait for it; a copy is asked for when it is back."""
        for e in self._list():
            e.sent = False
            if e.kind == "save":
                self._end(e, why)
        self._expire()

    def answered(self, body: dict[str, Any]) -> None:
        """The daemon has done it, or says why not."""
        from drafter_online.answers import Done
        from drafter_online.engines import read

        done: Done = read(body, Done)
        with self._lock:
            e = self._open.get(done.id)
        if e is None:
            return
        e.done = done.done
        if done.done:
            what = "is in" if e.kind == "save" else "goes on from"
            logger.info("rollspec: the drafter's training %s %s.", what, e.folder)
        elif done.error is None:
            logger.info("rollspec: the drafter's daemon keeps its own state, apart from the job's checkpoints.")
        self._end(e, done.error)

    def _add(self, kind: str, folder: Path, seconds: float) -> _Errand:
        with self._lock:
            self._numbers += 1
            e = self._open[self._numbers] = _Errand(self._numbers, kind, folder, time.monotonic() + seconds)
        return e

    def _list(self) -> list[_Errand]:
        with self._lock:
            return list(self._open.values())

    def _close(self, e: _Errand) -> _Errand | None:
        with self._lock:
            return self._open.pop(e.number, None)

    def _end(self, e: _Errand, error: str | None) -> None:
        if self._close(e) is None:
            return
        if error is not None:
            self._fault("saving" if e.kind == "save" else "loading", error)
        e.ended.set()

    def _expire(self) -> None:
        now = time.monotonic()
        for e in self._list():
            if e.kind == "load" and now > e.until:
                self._end(e, f"the daemon has not answered for {LOAD_SECONDS:g} s")
