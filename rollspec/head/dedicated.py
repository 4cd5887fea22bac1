"""Feeds a trainer in another process and takes its versions (`drafter.mode: dedicated`; `policy`, which feeds it from
the policy's training pass, takes its versions alone): `drafter-online serve`.

A thread of the worker moves captured samples and rewards to the daemon and versions from it to the swapper, which swaps
them in between two steps and tries them. The engine's own thread only leaves things in bounded queues. While the daemon
is away nothing is recorded, what was recorded is dropped and counted, and the engine serves with the weights it has;
when the daemon is back, all resumes.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import socket
import tempfile
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from drafter_online import target, wire
from drafter_online.engines import Progress, read
from drafter_online.errors import DrafterError
from drafter_online.fetch import Fetch
from drafter_online.job_checkpoint import CheckpointClient
from drafter_online.link import Link
from drafter_online.versions import Verdict
from drafter_online.wire import Message
from rollspec.head.domains import Domains
from rollspec.head.draft_head import DraftHead
from rollspec.head.training import TICK_SECONDS, HeadTraining

logger = logging.getLogger("rollspec")

STATUS_SECONDS = 1.0
FETCH_SECONDS = 10.0  # without a piece, after which it is asked for again
MOST_REWARDS = 4096  # per message


class DedicatedTraining(HeadTraining):
    """One worker's connection to its daemon, which has a device of its own: nothing waits for the engine's steps.

    Raises:
        DrafterError: the endpoint cannot be used, or needs a token.
    """

    ends_with = "drafter feedback", "rollspec: the drafter gets no feedback from now on (%s)."

    def __init__(self, head: DraftHead) -> None:
        super().__init__(head)
        self.domains = head.domains = Domains(head.bridge.running)
        self.counts = {"sent": 0, "feedback_dropped": 0, "rewards": 0, "offers": 0, "fetched": 0}
        self.checkpoints = CheckpointClient(self._fault)
        self.progress: Progress | None = None  # of the daemon's training, in its last message
        self.trained = {"steps": 0.0, "tokens": 0.0}  # this engine's part of what the daemon trained meanwhile
        self._verdicts: deque[tuple[int, str, str]] = deque(maxlen=16)
        self._fetch: Fetch | None = None
        self._asked = 0.0  # when the last piece was asked for
        self._cache = Path(tempfile.gettempdir()) / f"rollspec-versions-{uuid.uuid4().hex}"
        self._canary = True  # of the version that is fetched
        self._given: int | None = None  # the version in the cache that the swapper has
        self._pieces: Iterator[Message] | None = None
        self._pieces_of = 0
        self._reported = 0.0
        assert self.config.endpoint is not None
        self.name = f"{socket.gethostname()}:{os.getpid()}"
        hello = {"name": self.name, "base": head.base, "aux": list(head.layers)}
        token = wire.read_token(self.config.token_file)
        self.link = Link(self.config.endpoint, hello, token=token)
        head.swapper.report = self._judged
        self.capture.paused = self.config.mode == "policy"
        self._thread.start()
        atexit.register(self.stop)

    def _judged(self, version: int, verdict: Verdict, reason: str) -> None:
        self._verdicts.append((version, verdict, reason[:500]))

    def info(self) -> dict[str, Any]:
        """What was sent and taken so far, and how the daemon's training goes."""
        p = self.progress
        progress: dict[str, Any] = {} if p is None else {
            "loss": p.loss, "terms": p.terms, "length": p.length, "samples": p.samples,
            "step_age_seconds": p.step_age, "hangs": p.hangs,
        }  # fmt: skip
        return progress | {
            "mode": self.config.mode,
            "endpoint": self.link.endpoint,
            "away": self.link.away,
            "error": self.error,
            "private": self.domains.private,
            **self.counts,
            **self.trained,
            **{name: self.link.counts[name] for name in ("sent_bytes", "sessions", "lost")},
        }

    def save(self, folder: Path) -> bool:
        """Have the daemon copy its state to `folder`; False where it does not, or keeps its state to itself."""
        if self._stop.is_set() or not self._thread.is_alive():
            return False
        return self.checkpoints.save(_of_job(folder))

    def load(self, folder: Path) -> bool:
        """Have the daemon resume from a copy that `save` made, once it listens; False where there is none."""
        home = self.head.bridge.config.history.dir
        if home is not None and folder.resolve() == (home / "drafter").resolve():
            return False  # the daemon's own, which it has read
        folder = _of_job(folder)
        if not folder.is_dir():
            return False
        self.checkpoints.load(folder)
        return True

    def stop(self) -> None:
        """End the thread and say goodbye; bounded."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(2)

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._stop.is_set():
            for message in self.link.poll(TICK_SECONDS):
                self._handle(message)
            self.checkpoints.tick(self.link)
            away = self.link.away is not None
            self.capture.paused = away or self.config.mode == "policy"  # the trainer has samples from it
            if away:
                self._drop()
                continue
            self._report()
            self._continue()  # before samples, which fill the window
            self._ship()

    def _close(self) -> None:
        self.link.close()
        self.link.away = "the connection has ended"
        self.checkpoints.tick(self.link)
        shutil.rmtree(self._cache, ignore_errors=True)

    def _drop(self) -> None:
        """No daemon listens: what waits is of no use later."""
        self.progress = None
        self.counts["feedback_dropped"] += len(self.capture.take())
        self._rewards.clear()
        self._pieces = self._fetch = None

    def _report(self) -> None:
        now = time.monotonic()
        if now - self._reported < STATUS_SECONDS:
            return
        self._reported = now
        if self._given is not None and any(version == self._given for version, *_ in list(self._verdicts)):
            self._given = None
            shutil.rmtree(self._cache, ignore_errors=True)  # a process that is killed later leaves nothing
        bridge, swapper = self.head.bridge, self.head.swapper
        counts: dict[str, float] = {f"link_{k}": v for k, v in self.link.counts.items()}
        counts |= {"dropped": self.counts["feedback_dropped"], "private": self.domains.private}
        counts |= {f"capture_{k}": v for k, v in self.capture.counts.items()}
        body = {
            "version": swapper.version,
            "busy": swapper.busy or self._fetch is not None,
            "policy": bridge.engine.version,
            "speculating": bridge.state()[0] != "none",
            "off": list(bridge.engine.tuner.guard.off),
            "domains": self.domains.to_dict(),
            "verdicts": [list(t) for t in list(self._verdicts)],
            "counts": counts,
            "faults": [f[:200] for f in (bridge.fault, self.error) if f],
        }
        self.link.send(Message("status", body))

    def _ship(self) -> None:
        # What does not fit into the window waits with the capture, which is bounded and drops its oldest.
        while self.capture.ready and self.link.ready and not self._stop.is_set():
            for sample in self.capture.take(1):
                sent, dropped = self.link.send_sample(sample)
                self.counts["sent"] += sent
                self.counts["feedback_dropped"] += dropped
        while self._rewards and self.link.ready:
            some = [self._rewards.popleft() for _ in range(min(len(self._rewards), MOST_REWARDS))]
            self.link.send(Message("rewards", dict(some)))
            self.counts["rewards"] += len(some)
        with self.head.reading:
            if self.head.asleep:
                self._pieces = None  # views of memory that is not there
            for piece in islice(self._pieces or (), 4):
                if not self.link.ready or self._pieces_of != self.head.bridge.engine.version:
                    self._pieces = None  # behind, or of an old policy: the daemon asks again
                    break
                self.link.send(piece)

    # ---- versions ---------------------------------------------------------------------------------------------------

    def _handle(self, message: Message) -> None:
        try:
            if message.kind == "offer":
                self._offered(message.body)
            elif message.kind == "chunk" and self._fetch is not None:
                if self._fetch.take(message):
                    self._asked = 0.0
            elif message.kind == "refresh":
                self._refresh()
            elif message.kind == "status":
                self._progressed(now := read(message.body, Progress))
                self._watch(now.hangs, ", in its daemon")
            elif message.kind == "done":
                self.checkpoints.answered(message.body)
        except DrafterError as e:
            version = message.body.get("version")
            self._fetch = None
            if isinstance(version, int):
                self._judged(version, "refused", str(e))
            logger.warning("rollspec: %s", str(e).removeprefix("drafter-online: "))

    def _progressed(self, now: Progress) -> None:
        """What the daemon trained since its last message, in equal parts for its engines, whose counts are summed."""
        before, self.progress = self.progress, now
        if before is None:
            return  # what it had trained before this engine knew of it
        for name in self.trained:
            more = getattr(now, name) - getattr(before, name)  # below 0 where it resumed an older state
            self.trained[name] += max(more, 0) / max(now.engines, 1)

    def _offered(self, body: dict[str, Any]) -> None:
        swapper = self.head.swapper
        number, manifest = body.get("version"), body.get("manifest")
        if not (isinstance(number, int) and isinstance(manifest, bytes)) or number <= swapper.version:
            return
        if swapper.busy or self._fetch is not None:
            return
        self.counts["offers"] += 1
        self._canary = bool(body.get("canary", True))
        self._fetch = Fetch(manifest, self._cache)
        self._asked = 0.0

    def _continue(self) -> None:
        """Ask for the next piece of a version; when all are here, have it swapped in."""
        if self._fetch is None or time.monotonic() - self._asked < FETCH_SECONDS:
            return
        wanted = self._fetch.wants()
        if wanted is not None:
            if self.link.ready and self.link.send(Message("fetch", wanted)):
                self._asked = time.monotonic()
            return
        self.counts["fetched"] += 1
        self.head.swapper.offer(self._fetch.path, self._canary)
        self._given, self._fetch = self._fetch.number, None

    # ---- the target's own tensors -----------------------------------------------------------------------------------

    def _refresh(self) -> None:
        """The daemon asks for the present policy's embedding, norm and LM head."""
        if not self.head.asleep and (weights := self._target()) is not None:  # else it asks again
            self._pieces_of = self.head.bridge.engine.version
            self._pieces = target.pieces(weights, self.name, self._pieces_of)


def _of_job(folder: Path) -> Path:
    """The daemon's place in a checkpoint: one beside the replicas' own, whose names are `replica_<i>/drafter`."""
    replica = folder.parent
    return replica.parent / folder.name if replica.name.startswith("replica_") else folder
