"""What an engine asks of its daemon when the job writes a checkpoint, and when it resumes from one: the other end of
`job_checkpoint`.

`save` waits for the answer, bounded; `load` does not: the daemon may still be starting, and takes the copy over before
it gets samples. The thread that has the connection sends and receives both.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal

from drafter_online.engines import Done, read
from drafter_online.link import Link
from drafter_online.wire import Message

log = logging.getLogger(__name__)

SAVE_SECONDS = 15.0
"""How long a checkpoint waits for the daemon's part of it: trainers wait 30 s for their calls into the engine."""

LOAD_SECONDS = 300.0
"""How long a copy may wait for the daemon to start."""


@dataclass(eq=False)
class _Request:
    kind: Literal["save", "load"]
    folder: Path
    until: float
    sent: bool = False
    done: bool = False
    ended: threading.Event = field(default_factory=threading.Event)


class CheckpointClient:
    """Of one connection. `fault` is called with what failed, and why."""

    def __init__(self, fault: Callable[[str, str], None]) -> None:
        self._fault = fault
        self._open: dict[int, _Request] = {}
        self._numbers = count(1)

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
        request = _Request("save", folder, time.monotonic() + SAVE_SECONDS)
        number = next(self._numbers)
        self._open[number] = request
        if not request.ended.wait(SAVE_SECONDS):
            self._end(number, f"the daemon has not answered for {SAVE_SECONDS:g} s")
        if not request.done:
            with contextlib.suppress(OSError):  # there is something in it
                folder.rmdir()
        return request.done

    def load(self, folder: Path) -> None:
        """Have the state taken from `folder`, as soon as the daemon listens."""
        self._open[next(self._numbers)] = _Request("load", folder, time.monotonic() + LOAD_SECONDS)

    def send(self, link: Link) -> None:
        """On the connection's thread, while the daemon listens: ask what was not asked yet."""
        for number, r in list(self._open.items()):
            if not r.sent:
                r.sent = link.send(Message(r.kind, {"id": number, "folder": str(r.folder.resolve())}))
        self._expire()

    def away(self, why: str) -> None:
        """The daemon does not listen: a checkpoint must not wait for it; a copy is asked for when it is back."""
        for number, r in list(self._open.items()):
            r.sent = False
            if r.kind == "save":
                self._end(number, why)
        self._expire()

    def answered(self, body: dict[str, Any]) -> None:
        """The daemon has done it, or says why not."""
        done: Done = read(body, Done)
        if (r := self._open.get(done.id)) is None:
            return
        r.done = done.done
        if done.done:
            what = "is in" if r.kind == "save" else "resumes from"
            log.info("drafter-online: the training %s %s.", what, r.folder)
        elif done.error is None:
            log.info("drafter-online: the daemon keeps its own state, apart from the job's checkpoints.")
        self._end(done.id, done.error)

    def _end(self, number: int, error: str | None) -> None:
        r = self._open.pop(number, None)  # who takes it out reports its outcome
        if r is None:
            return
        if error is not None:
            self._fault("saving" if r.kind == "save" else "loading", error)
        r.ended.set()

    def _expire(self) -> None:
        for number, r in list(self._open.items()):
            if r.kind == "load" and time.monotonic() > r.until:
                self._end(number, f"the daemon has not answered for {LOAD_SECONDS:g} s")
