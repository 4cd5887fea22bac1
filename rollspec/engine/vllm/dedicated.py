"""Feeds a trainer in another process and takes its versions (`drafter.mode: dedicated`): `drafter-online serve`.

A thread of the worker moves captured samples and rewards to the daemon and versions from it to the swapper, which swaps
them in between two steps and tries them. The engine's own thread only leaves things in bounded queues. While the daemon
is away nothing is recorded, what was recorded is dropped and counted, and the engine serves with the weights it has;
when the daemon is back, all goes on.
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
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollspec.engine.vllm.checkpoint_client import CheckpointClient
from rollspec.engine.vllm.domains import Domains
from rollspec.engine.vllm.faults import TrainingFaults

if TYPE_CHECKING:
    import torch

    from drafter_online.answers import Progress
    from drafter_online.fetch import Fetch
    from drafter_online.lifecycle import Verdict
    from drafter_online.samples import Sample
    from drafter_online.wire import Message
    from rollspec.engine.vllm.training import TrainedHead

logger = logging.getLogger("rollspec")

TICK_SECONDS = 0.05
STATUS_SECONDS = 1.0
FETCH_SECONDS = 10.0  # without a piece, after which it is asked for again
SAMPLE_BYTES = 32 << 20
"""Longer samples go in windows: of the auxiliary states, the largest tensor."""

MOST_REWARDS = 4096  # per message


class DedicatedTraining:
    """One worker's connection to its daemon.

    Raises:
        DrafterError: the endpoint cannot be used, or needs a token.
    """

    def __init__(self, learned: TrainedHead) -> None:
        from drafter_online import wire
        from drafter_online.head import base_of
        from drafter_online.link import Link

        config = learned.bridge.config.drafter
        self.learned = learned
        self.updating = False  # the trainer has a device of its own: nothing waits for this
        self.error: str | None = None
        self.resumed = (0, 0)  # steps and tokens of an earlier run are the daemon's to count
        self.parts: dict[str, torch.Tensor] | None = None  # the target's own, put together from all ranks
        self.domains = learned.domains = Domains(learned.bridge.running)
        self.counts = {"sent": 0, "dropped": 0, "rewards": 0, "offers": 0, "fetched": 0}
        self.checkpoints = CheckpointClient(TrainingFaults(learned.bridge.count))
        self.progress: Progress | None = None  # of the daemon's training, as it said last
        self._hung = False
        self._rewards: deque[tuple[str, float]] = deque(maxlen=1 << 16)
        self._trials: deque[tuple[int, str, str]] = deque(maxlen=16)
        self._fetch: Fetch | None = None
        self._asked = 0.0  # when the last piece was asked for
        self._cache: Path | None = None
        self._pieces: Iterator[Message] | None = None
        self._pieces_of = 0
        self._told = 0.0
        self._stop = threading.Event()
        assert config.endpoint is not None and learned.swapper is not None
        self.name = f"{socket.gethostname()}:{os.getpid()}"
        base = base_of(learned.runner.model_config.hf_text_config)
        hello = {"name": self.name, "base": base, "aux": list(learned.layers)}
        token = wire.read_token(config.token_file)
        self.link = Link(config.endpoint, hello, token=token, server_key=config.server_key)
        learned.swapper.verdicts.report = self._tried
        self._thread = threading.Thread(target=self._run, name="rollspec-drafter", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    # ---- what the engine's thread says ------------------------------------------------------------------------------

    def step_begins(self) -> None:
        """The engine computes; the trainer has its own device."""

    def step_ended(self) -> None:
        """The engine has computed."""

    def reward(self, items: list[tuple[str, str, float]]) -> None:
        """Rewards by (prompt key, response key), for the samples of these responses."""
        self._rewards.extend((f"{prompt}:{response}", value) for prompt, response, value in items)

    def _tried(self, version: int, verdict: Verdict, reason: str) -> None:
        self._trials.append((version, verdict, reason[:500]))

    def info(self) -> dict[str, Any]:
        """What was sent and taken so far."""
        counts = self.link.counts
        return self._progress() | {
            "mode": "dedicated",
            "endpoint": self.link.endpoint,
            "away": self.link.away,
            "error": self.error,
            "sent": self.counts["sent"],
            "sent_bytes": counts["sent_bytes"],
            "feedback_dropped": self.counts["dropped"],
            "sessions": counts["sessions"],
            "lost": counts["lost"],
            "offers": self.counts["offers"],
            "fetched": self.counts["fetched"],
            "private": self.domains.private,
        }

    def _progress(self) -> dict[str, Any]:
        p = self.progress
        if p is None:
            return {}
        return {
            "loss": p.loss,
            "terms": p.terms,
            "length": p.length,
            "samples": p.samples,
            "step_age_seconds": p.step_age,
            "hangs": p.hangs,
        }

    def save(self, folder: Path) -> bool:
        """Have the daemon copy its state to `folder`; False where it does not, or keeps its state to itself."""
        if self._stop.is_set() or not self._thread.is_alive():
            return False
        return self.checkpoints.save(folder, self.link.away)

    def load(self, folder: Path) -> bool:
        """Have the daemon go on from a copy that `save` made, once it listens; False where there is none."""
        home = self.learned.bridge.config.history.dir
        if not folder.is_dir() or (home is not None and folder.resolve() == (home / "drafter").resolve()):
            return False  # below history.dir it is the daemon's own, which it has read
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
            while not self._stop.is_set():
                messages = self.link.poll(TICK_SECONDS)
                for message in messages:
                    self._handle(message)
                away = self.link.away is not None
                capture = self.learned.capture
                if capture is not None:
                    capture.paused = away
                if away:
                    self._drop()
                    continue
                self.checkpoints.send(self.link)
                self._report()
                self._ship()
                self._continue()
        except Exception as e:
            cause = f"{type(e).__name__}: {e}"
            self.learned.bridge.faults[f"drafter feedback: {cause}"] = 1
            logger.warning("rollspec: the drafter gets no feedback from now on (%s).", cause, exc_info=e)
            if self.learned.capture is not None:
                self.learned.capture.paused = True
            self.error = cause
        finally:
            self.checkpoints.away("the connection has ended")
            self.link.close()
            self._give_up()
            if self._cache is not None:
                shutil.rmtree(self._cache, ignore_errors=True)

    def _drop(self) -> None:
        """Nobody listens: what waits is of no use later."""
        self.checkpoints.away(str(self.link.away))
        self.progress = None
        capture = self.learned.capture
        if capture is not None and capture.ready:
            self.counts["dropped"] += len(capture.take())
        self._rewards.clear()
        self._pieces = None
        self._give_up()

    def _report(self) -> None:
        from drafter_online.wire import Message

        now = time.monotonic()
        if now - self._told < STATUS_SECONDS:
            return
        self._told = now
        bridge, swapper, capture = self.learned.bridge, self.learned.swapper, self.learned.capture
        assert swapper is not None
        counts: dict[str, float] = {f"link_{k}": v for k, v in self.link.counts.items()}
        counts |= {"dropped": self.counts["dropped"], "private": self.domains.private}
        if capture is not None:
            counts |= {f"capture_{k}": v for k, v in capture.counts.items()}
        body = {
            "version": swapper.version,
            "busy": swapper.busy or self._fetch is not None,
            "policy": bridge.proposer.version,
            "speculating": bridge.state()[0] != "none",
            "off": list(bridge.proposer.tuner.guard.off),
            "domains": self.domains.to_dict(),
            "trials": [list(t) for t in self._trials],
            "counts": counts,
            "faults": [
                f[:200] for f in ([bridge.fault] if bridge.fault else []) + ([self.error] if self.error else [])
            ],
        }
        self.link.send(Message("status", body))

    def _ship(self) -> None:
        from drafter_online.wire import Message

        capture = self.learned.capture
        # What does not fit into the window waits with the capture, which is bounded and drops its oldest.
        while capture is not None and capture.ready and self.link.ready and not self._stop.is_set():
            for sample in capture.take(1):
                for part in windows(sample):
                    tensors, record = part.parts()
                    sent = self.link.send(Message("samples", record, tensors))
                    self.counts["sent" if sent else "dropped"] += 1
        while self._rewards and self.link.ready:
            some = [self._rewards.popleft() for _ in range(min(len(self._rewards), MOST_REWARDS))]
            self.link.send(Message("rewards", dict(some)))
            self.counts["rewards"] += len(some)
        with self.learned.reading:
            if self.learned.asleep:
                self._pieces = None  # views of memory that is not there
            for piece in islice(self._pieces or (), 4):
                if not self.link.ready or self._pieces_of != self.learned.bridge.proposer.version:
                    self._pieces = None  # behind, or of an old policy: the daemon asks again
                    break
                self.link.send(piece)

    # ---- versions ---------------------------------------------------------------------------------------------------

    def _handle(self, message: Message) -> None:
        from drafter_online.errors import DrafterError

        try:
            if message.kind == "offer":
                self._offered(message.body)
            elif message.kind == "chunk" and self._fetch is not None:
                if self._fetch.take(message):
                    self._asked = 0.0
            elif message.kind == "refresh":
                self._refresh()
            elif message.kind == "status":
                self._told_of(message.body)
            elif message.kind == "done":
                self.checkpoints.answered(message.body)
        except DrafterError as e:
            version = message.body.get("version")
            self._give_up()
            if isinstance(version, int):
                self._tried(version, "refused", str(e))
            logger.warning("rollspec: %s", str(e).removeprefix("drafter-online: "))

    def _told_of(self, body: dict[str, Any]) -> None:
        from drafter_online.answers import Progress
        from drafter_online.engines import read

        p: Progress = read(body, Progress)
        if p.hangs is not None and not self._hung:
            self.learned.bridge.count("drafter training: a step hangs")
            logger.warning("rollspec: %s, in its daemon; the engine goes on with the drafter it has.", p.hangs)
        self.progress, self._hung = p, p.hangs is not None

    def _offered(self, body: dict[str, Any]) -> None:
        from drafter_online.fetch import Fetch

        swapper = self.learned.swapper
        number, path, manifest = body.get("version"), body.get("path"), body.get("manifest")
        if not (isinstance(number, int) and isinstance(path, str) and isinstance(manifest, bytes)):
            return
        assert swapper is not None
        if swapper.busy or self._fetch is not None or number <= swapper.version:
            return
        self.counts["offers"] += 1
        self._canary = bool(body.get("canary", True))
        if _same(Path(path) / "manifest.json", manifest):
            swapper.offer(Path(path), self._canary)
            return
        if self._cache is None:
            self._cache = Path(tempfile.mkdtemp(prefix="rollspec-versions-"))
        self._fetch = Fetch(manifest, self._cache)
        self._asked = 0.0

    def _continue(self) -> None:
        """Ask for the next piece of a version; when all are here, have it swapped in."""
        from drafter_online.errors import DrafterError
        from drafter_online.wire import Message

        if self._fetch is None or time.monotonic() - self._asked < FETCH_SECONDS:
            return
        wanted = self._fetch.wants()
        if wanted is not None:
            self._asked = time.monotonic()
            self.link.send(Message("fetch", wanted))
            return
        fetch, self._fetch = self._fetch, None
        try:
            path = fetch.done()
        except DrafterError as e:
            self._tried(fetch.number, "refused", str(e))
            return
        self.counts["fetched"] += 1
        assert self.learned.swapper is not None
        self.learned.swapper.offer(path, self._canary)

    def _give_up(self) -> None:
        if self._fetch is not None:
            self._fetch.close()
        self._fetch = None

    _canary = True

    # ---- the target's own tensors -----------------------------------------------------------------------------------

    def _refresh(self) -> None:
        """The daemon asks for the present policy's embedding, norm and LM head."""
        if self.parts is None and not self.learned.ranks.alone:
            return  # putting it together takes all ranks, which they do with the next weights
        if self.learned.asleep:
            return  # asked again
        parts = self.parts if self.parts is not None else self.learned.target_parts()
        vocabulary = int(self.learned.runner.model_config.get_vocab_size())  # vLLM pads tensors for its shards
        weights = {n: w if n == "norm" else w[:vocabulary] for n, w in parts.items()}
        self._pieces_of = self.learned.bridge.proposer.version
        self._pieces = pieces(weights, self.name, self._pieces_of)


def windows(sample: Sample, limit: int = SAMPLE_BYTES) -> list[Sample]:
    """A sample in parts whose auxiliary states have at most `limit` bytes; the last tokens go with the part before."""
    rows = max(16, limit // max(1, sample.hidden_states.shape[1] * sample.hidden_states.element_size()))
    if len(sample) <= rows:
        return [sample]
    parts = [sample.window(a, min(a + rows, len(sample))) for a in range(0, len(sample), rows)]
    return [p for p in parts if len(p) >= 2 and bool(p.loss_mask.any())]


def pieces(weights: dict[str, torch.Tensor], sender: str, policy: int) -> Iterator[Message]:
    """The target's tensors in messages of about `PIECE_BYTES` each, in order."""
    from drafter_online.target import PIECE_BYTES
    from drafter_online.wire import Message

    names = list(weights)
    for name, t in weights.items():
        each = max(1, PIECE_BYTES // max(1, t[0].numel() * t.element_size()))
        for row in range(0, len(t), each):
            body = {"sender": sender, "policy": policy, "name": name, "row": row, "rows": len(t), "names": names}
            yield Message("target", body, {"rows": t[row : row + each].to("cpu", copy=True)})


def _same(path: Path, content: bytes) -> bool:
    try:
        return path.read_bytes() == content
    except OSError:
        return False
