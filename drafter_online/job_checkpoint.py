"""A daemon's state in the checkpoints of its job: both ends of what an engine asks for when the job saves and resumes.

An engine that saves has the daemon copy state, samples and versions to a folder of the checkpoint, one for all
replicas, and waits for it, bounded. It does not wait for `load`: the daemon may still be starting.

Only the daemon of a job (`ServiceConfig.job`) does it: engines that share a server's daemon must not choose where it
writes. Requests come on the hub's thread and are done on the one that trains, between two micro-steps.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from drafter_online.checkpoint import Checkpoints
from drafter_online.engines import CheckpointRequest, Done, Engines, read
from drafter_online.errors import DrafterError, ServiceError
from drafter_online.files import oserror_as, sync_folder, sync_tree, temporary_folder
from drafter_online.versions import Versions
from drafter_online.wire import Message

if TYPE_CHECKING:
    from drafter_online.hub import Hub
    from drafter_online.link import Link
    from drafter_online.release import Release
    from drafter_online.settings import ServiceConfig
    from drafter_online.trainer import Trainer

log = logging.getLogger(__name__)

PARTS = ("state", "buffer", "versions")
REPLACED = "replaced"
COPY, UNDER_WAY, RECORD = ".copy", ".under-way", "record"
"""In a folder whose parts are being replaced: where new ones are put together; the same once they are whole and on
disk, with a record of what is to take which place.
"""

SAVE_SECONDS = 15.0
"""How long a checkpoint waits for the daemon's part of it: trainers wait 30 s for their calls into the engine."""

LOAD_SECONDS = 300.0
"""How long a copy may wait for the daemon to start."""


# ---- the engine's end -----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Request:
    kind: Literal["save", "load"]
    folder: Path
    asked: float = field(default_factory=time.monotonic)
    sent: bool = False
    done: bool = False
    ended: threading.Event = field(default_factory=threading.Event)


class CheckpointClient:
    """Of one connection. `fault` is called with what failed, and why."""

    def __init__(self, fault: Callable[[str, str], None]) -> None:
        self._fault = fault
        self._open: dict[int, _Request] = {}
        self._numbers = count(1)

    def save(self, folder: Path) -> bool:
        """Have the state copied to `folder`; whether it was."""
        try:
            folder.mkdir(parents=True, exist_ok=True)  # the daemon copies to what is there, so that both mean the same
        except OSError as e:
            self._fault("saving", str(e))
            return False
        number, request = self._ask("save", folder)
        request.ended.wait(SAVE_SECONDS)
        self._end(number, f"the daemon has not answered for {SAVE_SECONDS:g} s")
        if not request.done:
            with contextlib.suppress(OSError):  # there is something in it
                folder.rmdir()
        return request.done

    def load(self, folder: Path) -> None:
        """Have the state taken from `folder`, as soon as the daemon listens."""
        self._ask("load", folder)

    def tick(self, link: Link) -> None:
        """On the connection's thread: ask what was not asked yet, and give up a load that has waited for long."""
        for number, r in list(self._open.items()):
            r.sent = r.sent and link.away is None  # a daemon that was away is asked again
            if r.kind == "save" and link.away is not None:
                self._end(number, link.away)
            elif r.kind == "load" and time.monotonic() - r.asked > LOAD_SECONDS:
                self._end(number, f"the daemon has not answered for {LOAD_SECONDS:g} s")
            elif not r.sent:
                r.sent = link.send(Message(r.kind, {"id": number, "folder": str(r.folder.resolve())}))

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

    def _ask(self, kind: Literal["save", "load"], folder: Path) -> tuple[int, _Request]:
        number, request = next(self._numbers), _Request(kind, folder)
        self._open[number] = request
        return number, request

    def _end(self, number: int, error: str | None) -> None:
        r = self._open.pop(number, None)  # who takes it out reports its outcome
        if r is None:
            return
        if error is not None:
            self._fault("saving" if r.kind == "save" else "loading", error)
        r.ended.set()


# ---- the daemon's end -----------------------------------------------------------------------------------------------


class Daemon(Protocol):
    """What is needed of the service."""

    config: ServiceConfig
    engines: Engines
    hub: Hub
    release: Release
    trainer: Trainer

    def healthy(self) -> tuple[bool, str]:
        """Whether the training thread makes progress; why not."""

    def save_all(self) -> None:
        """Write all state now."""

    def taken_over(self) -> None:
        """Another state has come into the place of this one."""


class JobCheckpoint:
    """Of one service."""

    def __init__(self, service: Daemon) -> None:
        self.service = service
        self.home = service.config.dir
        self._waiting: deque[tuple[str, str, CheckpointRequest]] = deque(maxlen=1024)
        self._last: tuple[str, str] | None = None  # what was done last: kind, folder
        self._for: set[str] = set()  # sessions that it was done for

    def ask(self, session: str, message: Message) -> None:
        """On the hub's thread: have it done, or say at once that it will not be."""
        request: CheckpointRequest = read(message.body, CheckpointRequest)
        good, why = self.service.healthy()
        if not self.service.config.job:
            self._answer(session, Done(request.id, False))
        elif not good:
            self._answer(session, Done(request.id, False, f"the drafter's trainer does not answer: {why}"))
        else:
            self._waiting.append((session, message.kind, request))

    def run(self) -> None:
        """On the thread that trains: do what waits."""
        while self._waiting:
            session, kind, request = self._waiting.popleft()
            error = None
            try:
                if not self._done_for_sibling(session, (kind, request.folder)):
                    (self._save if kind == "save" else self._load)(Path(request.folder))
            except Exception as e:  # the job waits for an answer
                self._last = None
                error = e.plain if isinstance(e, DrafterError) else f"{type(e).__name__}: {e}"
                log.warning("drafter-online: %s", error, exc_info=None if isinstance(e, DrafterError) else e)
            self._answer(session, Done(request.id, error is None, error))

    def _done_for_sibling(self, session: str, asked: tuple[str, str]) -> bool:
        """Whether another replica that is still there asked for the same: all of them do, at one checkpoint."""
        siblings = self._for & set(self.service.engines.by_session)
        same = asked == self._last and bool(siblings) and session not in siblings
        self._last, self._for = asked, (siblings if same else set()) | {session}
        return same

    def _answer(self, session: str, done: Done) -> None:
        self.service.hub.send(session, Message("done", msgspec.to_builtins(done)))

    def _save(self, folder: Path) -> None:
        """Copy the state to `folder`, in the place of an older copy there.

        Raises:
            ServiceError: the folder is not there, cannot be written, or is a part of this daemon's own.
        """
        self.service.save_all()
        if not self._other(folder):
            return
        if not folder.is_dir():  # one that only the job sees; made here, the others would not find it
            raise ServiceError(f"{folder} is not there for the daemon; put checkpoints on shared storage.")
        what = f"the drafter's state cannot be copied to {folder}"
        with oserror_as(ServiceError, what, "make it writable for the daemon, or free space"):
            copy_state(self.home, folder)
        log.info("drafter-online: the state was copied to %s.", folder)

    def _load(self, folder: Path) -> None:
        """Put a copy in the place of what is here, which is set aside.

        Raises:
            DrafterError: there is none, it cannot be read or does not fit, or this daemon's folder cannot be written.
        """
        if not self._other(folder):
            return
        finish(folder)
        # Into the trainer first: what does not fit leaves everything as it is.
        if not self.service.trainer.resume(Checkpoints(folder / "state")):
            raise ServiceError(f"there is no state of a drafter's training in {folder}.")
        what = f"the copy in {folder} cannot be taken over"
        with oserror_as(ServiceError, what, "what was here is kept"), self.service.release.replacing():
            copy_state(folder, self.home, aside=True)
        self.service.taken_over()
        log.info("drafter-online: training resumes from %s; what was here is set aside.", folder)

    def _other(self, folder: Path) -> bool:
        """Whether a folder is another one than this daemon's own.

        Raises:
            ServiceError: it is within a part of it, or not absolute.
        """
        if not folder.is_absolute():
            raise ServiceError(f"{folder} is no absolute path; the daemon runs in another folder.")
        there, here = folder.resolve(), self.home.resolve()
        if any(there.is_relative_to(here / part) for part in (*PARTS, REPLACED)):
            raise ServiceError(f"{folder} is a part of the daemon's own folder {here}; give another.")
        return there != here


def copy_state(source: Path, target: Path, aside: bool = False) -> None:
    """Copy the parts of one folder to another, whose own are kept `aside` or deleted; what cannot be copied changes
    nothing there.
    """
    store = Versions(source / "versions")
    wanted = {store.promoted(), store.candidate(), store.latest()}

    def unwanted(at: str, names: list[str]) -> list[str]:
        old = [n for n in names if n.isdigit() and int(n) not in wanted] if Path(at).name == "versions" else []
        return old + [n for n in names if n.startswith(".")]  # unfinished

    finish(target)
    with temporary_folder(target, COPY) as new:
        for part in PARTS:
            if (source / part).is_dir():
                shutil.copytree(source / part, new / part, copy_function=_link, ignore=unwanted)
        record = {"aside": aside, "parts": [part for part in PARTS if (new / part).is_dir()]}
        (new / RECORD).write_text(json.dumps(record))
        sync_tree(new)
        if aside:
            shutil.rmtree(target / REPLACED, ignore_errors=True)
        os.rename(new, target / UNDER_WAY)  # from here on the next call finishes it, whatever happens to this one
    sync_folder(target)
    finish(target)


def finish(folder: Path) -> None:
    """Put new parts in the place of a folder's own, also those that a process left which was killed doing so: parts of
    two ages are never read together.

    Raises:
        OSError: it cannot be done now; what is under way stays for the next call.
    """
    for left in folder.glob(f"{COPY}-*"):
        shutil.rmtree(left, ignore_errors=True)
    new = folder / UNDER_WAY
    if (new / RECORD).is_file():
        found = json.loads((new / RECORD).read_bytes())
        aside = (folder if found["aside"] else new) / REPLACED
        aside.mkdir(exist_ok=True)
        for part in PARTS:
            if part not in found["parts"] or (new / part).is_dir():  # else it is in its place already
                for here, there in ((folder / part, aside / part), (new / part, folder / part)):
                    if here.is_dir():
                        os.rename(here, there)
        sync_folder(folder)
        (new / RECORD).unlink()
    shutil.rmtree(new, ignore_errors=True)


def _link(source: str, target: str) -> str:
    """Tensors are written once and replaced as files; anything else may be appended to."""
    if source.endswith(".safetensors"):
        with contextlib.suppress(OSError):  # another file system, or one without links
            os.link(source, target)
            return target
    shutil.copy2(source, target)
    return target
