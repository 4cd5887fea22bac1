"""What a job asks of its daemon when it writes a checkpoint, and when it resumes from one: `save` and `load`.

Asked for on the hub's thread and done on the one that trains, between two micro-steps. Only the daemon of a job
(`ServiceConfig.job`) does it: engines that share a server's daemon must not choose where it writes.
"""

from __future__ import annotations

import logging
from collections import deque
from pathlib import Path
from typing import Protocol

import msgspec

from drafter_online.checkpoint import Checkpoints
from drafter_online.copies import Copies
from drafter_online.engines import CheckpointRequest, Done, Engines, read
from drafter_online.errors import DrafterError, ServiceError
from drafter_online.hub import Hub
from drafter_online.settings import ServiceConfig
from drafter_online.trainer import Trainer
from drafter_online.wire import Message

log = logging.getLogger(__name__)

MOST = 1024  # that wait


class Daemon(Protocol):
    """What is needed of the service."""

    config: ServiceConfig
    engines: Engines
    hub: Hub
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
        self.copies = Copies(service.config.dir)
        self._waiting: deque[tuple[str, bool, CheckpointRequest]] = deque(maxlen=MOST)
        self._loaded: tuple[Path, set[str]] | None = None  # the checkpoint that was taken over, and engines there then

    def ask(self, session: str, message: Message) -> None:
        """On the hub's thread: have it done, or say at once that it will not be."""
        request: CheckpointRequest = read(message.body, CheckpointRequest)
        good, why = self.service.healthy()
        if not self.service.config.job:
            self._answer(session, Done(request.id, False))
        elif not good:
            self._answer(session, Done(request.id, False, f"the drafter's trainer does not answer: {why}"))
        else:
            self._waiting.append((session, message.kind == "save", request))

    def run(self) -> None:
        """On the thread that trains: do what waits."""
        while self._waiting:
            session, out, request = self._waiting.popleft()
            error = None
            try:
                (self._save if out else self._load)(Path(request.folder))
            except (DrafterError, OSError) as e:
                error = str(e).removeprefix("drafter-online: ")
                log.warning("drafter-online: %s", error)
            except Exception as e:  # the job waits for an answer
                error = f"{type(e).__name__}: {e}"
                log.warning("drafter-online: a checkpoint's copy failed (%s)", error, exc_info=e)
            self._answer(session, Done(request.id, error is None, error))

    def _answer(self, session: str, done: Done) -> None:
        self.service.hub.send(session, Message("done", msgspec.to_builtins(done)))

    def _save(self, folder: Path) -> None:
        if not self.copies.shares(folder):
            self.service.save_all()
        self.copies.out(folder)
        log.info("drafter-online: the state was copied to %s.", folder)

    def _load(self, folder: Path) -> None:
        there = {e.name for e in list(self.service.engines.by_session.values())}
        checkpoint = folder.parent.parent  # .../replica_0/drafter
        # A sibling had it done: replicas each name their own copy of one state.
        if self._loaded is not None and self._loaded[0] == checkpoint and self._loaded[1] & there:
            return
        state = Checkpoints(folder / "state")
        if not self.copies.other(folder):
            return
        # Into the trainer first: what does not fit leaves everything as it is.
        if not self.service.trainer.resume(state):
            raise ServiceError(f"drafter-online: there is no state of a drafter's training in {folder}.")
        self.copies.back(folder)
        self.service.taken_over()
        self._loaded = (checkpoint, there)
        log.info("drafter-online: training resumes from %s; what was here is set aside.", folder)
