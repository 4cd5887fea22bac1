"""Training of the worker's draft head as its engine sees it: feeds the trainer, a process that the job's engines share,
and takes its versions. With `drafter.mode: policy` it takes versions alone: samples come from the policy's training
pass.

A thread of the worker moves captured samples and rewards to the daemon and versions from it to the swapper, which swaps
them in between two steps and tries them. The engine's own thread only leaves things in bounded queues. While the daemon
is away nothing is recorded, what was recorded is dropped and counted, and the engine serves with the weights it has;
when the daemon is back, all resumes. Whatever fails costs the training, not the engine: the fault is recorded and
logged once.

With `drafter.mode: idle` the trainer is on an engine's own device, and reads there when a step runs (`Activity`).
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
from collections import Counter, deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from drafter_online import target, wire
from drafter_online.activity import Activity
from drafter_online.engines import Progress, read
from drafter_online.errors import DrafterError
from drafter_online.fetch import Fetch
from drafter_online.job_checkpoint import CheckpointClient
from drafter_online.link import Link
from drafter_online.versions import Verdict
from drafter_online.wire import Message
from rollspec.head.domains import Domains
from rollspec.head.draft_head import DraftHead
from rollspec.log_once import LogOnce

logger = logging.getLogger("rollspec")

TICK_SECONDS = 0.05  # that the thread waits for a message
STATUS_SECONDS = 1.0
FETCH_SECONDS = 10.0  # without a piece, after which it is asked for again
MOST_REWARDS = 4096  # per message


class HeadTraining:
    """One worker's part in the training, and its connection to the daemon.

    Args:
        head: of the rank that drafts.
        device: file by which a trainer on this device sees when the engine computes (`drafter.mode: idle`).

    Attributes:
        error: why there is no training any more.
        parts: the target's own tensors where they were put together from several ranks.

    Raises:
        DrafterError: the endpoint cannot be used, or needs a token.
    """

    def __init__(self, head: DraftHead, device: Path | None = None) -> None:
        assert head.capture is not None  # on the rank that drafts
        self.head, self.capture = head, head.capture
        self.config = head.bridge.config.drafter
        self.activity = Activity()
        self.device = device
        self.error: str | None = None
        self.parts: dict[str, torch.Tensor] | None = None
        self.domains = head.domains = Domains(head.bridge.running)
        self.counts = {"sent": 0, "feedback_dropped": 0, "rewards": 0, "offers": 0, "fetched": 0}
        self.checkpoints = CheckpointClient(self._fault)
        self.progress: Progress | None = None  # of the daemon's training, in its last message
        self.trained: Counter[str] = Counter(steps=0, tokens=0)  # this engine's part of what the daemon did meanwhile
        self._rewards: deque[tuple[str, float]] = deque(maxlen=1 << 16)
        self._updating = False
        self._hung = False
        self._log_once = LogOnce()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollspec-drafter", daemon=True)
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

    # ---- what the engine's thread says ------------------------------------------------------------------------------

    def step_begins(self) -> None:
        """The engine computes, so the machine is not the policy trainer's any more."""
        if self._updating:
            self.updating(False)
        self.activity.begins()

    def step_ended(self) -> None:
        """The engine has computed."""
        self.activity.ends()

    def updating(self, on: bool) -> None:
        """The policy's trainer uses the machine, or does no longer."""
        self._updating = on
        self.rests()

    def rests(self) -> None:
        """The engine sleeps, or has its device back."""
        self.activity.away = self._updating or self.head.asleep

    def reward(self, items: list[tuple[str, str, float]]) -> None:
        """Rewards by (prompt key, response key), for the samples of these responses."""
        self._rewards.extend((f"{prompt}:{response}", value) for prompt, response, value in items)

    def _judged(self, version: int, verdict: Verdict, reason: str) -> None:
        self._verdicts.append((version, verdict, reason[:500]))

    def info(self) -> dict[str, Any]:
        """What was sent and taken so far, and how the daemon's training goes."""
        p = self.progress
        progress: dict[str, Any] = {} if p is None else {
            "loss": p.loss, "terms": p.terms, "length": p.length, "samples": p.samples,
            "step_age_seconds": p.step_age, "hangs": p.hangs, **p.levels,
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

    def _run(self) -> None:
        try:
            self._work()
        except Exception as e:
            self.error = f"{type(e).__name__}: {e}"
            self.capture.paused = True
            self.head.bridge.count(f"drafter feedback: {self.error}")
            logger.warning("rollspec: the drafter gets no feedback from now on (%s).", self.error, exc_info=e)
        finally:
            self._close()

    def _work(self) -> None:
        while not self._stop.is_set():
            for message in self.link.poll(TICK_SECONDS):
                self._handle(message)
            self.checkpoints.tick(self.link)
            away = self.link.away is not None
            self.capture.paused = away or self.config.mode == "policy"  # the trainer has samples from it
            self.capture.logits = self.link.welcome.get("rejected") is not False
            if away:
                self._drop()
                continue
            self._report()
            self._continue()  # before samples, which fill the window
            self._ship()

    def _close(self) -> None:
        self.activity.hide()
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
        self._show()
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
            "seconds": self.activity.busy,
        }
        self.link.send(Message("status", body))

    def _show(self) -> None:
        """Let a trainer on this device see when the engine computes, once no other engine does; after the first step,
        because the trainer takes memory there and vLLM measures its own before.
        """
        if self.device is not None and self.activity.busy > 0.0:
            try:
                self.activity.show(self.device)
            except OSError as e:
                self._fault("sharing the device with", str(e))
                self.device = None

    def _fault(self, what: str, cause: str) -> None:
        """`what` failed (saving, resuming, publishing): training continues without."""
        self.head.bridge.count(f"drafter training, {what}: {cause}")
        self._log_once(what, "rollspec: %s the drafter's training failed and is left out (%s).", what, cause)

    def _watch(self, hangs: str | None) -> None:
        """Log and count a step that hangs, once. `hangs`: why it is taken for one."""
        if hangs is not None and not self._hung:
            self.head.bridge.count("drafter training: a step hangs")
            logger.warning("rollspec: %s, in its daemon; the engine keeps the drafter it has.", hangs)
        self._hung = hangs is not None

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
                self._watch(now.hangs)
            elif message.kind == "done":
                self.checkpoints.answered(message.body)
        except DrafterError as e:
            version = message.body.get("version")
            self._fetch = None
            if isinstance(version, int):
                self._judged(version, "refused", str(e))
            logger.warning("rollspec: %s", e.plain)

    def _progressed(self, now: Progress) -> None:
        """What the daemon trained since its last message, in equal parts for its engines, whose counts are summed."""
        before, self.progress = self.progress, now
        if before is None:
            return  # what it had trained before this engine knew of it
        counted = [(n, getattr(now, n) - getattr(before, n)) for n in ("steps", "tokens")]
        counted += [(n, value - before.idle.get(n, 0.0)) for n, value in now.idle.items()]
        for name, more in counted:  # below 0 where it resumed an older state
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

    def _target(self) -> dict[str, torch.Tensor] | None:
        """The target's parts without the rows that vLLM pads for its shards; None where they are not to be had now: all
        ranks must give them, which they do with the next weights, or vLLM is loading new ones.
        """
        if self.parts is None and not self.head.ranks.alone:
            return None
        parts = self.parts if self.parts is not None else self.head.target_parts()
        if any(w.is_meta for w in parts.values()):  # its weight transfer puts a layer's there until all have come
            return None
        vocabulary = int(self.head.runner.model_config.get_vocab_size())
        return {n: w if n == "norm" else w[:vocabulary] for n, w in parts.items()}


def _of_job(folder: Path) -> Path:
    """The daemon's place in a checkpoint: one beside the replicas' own, whose names are `replica_<i>/drafter`."""
    replica = folder.parent
    return replica.parent / folder.name if replica.name.startswith("replica_") else folder
