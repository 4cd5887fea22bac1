"""Trains the drafter inside the worker while the engine has nothing to do: capture -> training -> swap, in one engine.

A thread of the worker asks twenty times a second whether a micro-step may run (`drafter_online.idle`): never while the
engine sleeps, while a step was made within the last moments, or while the trainer says that the policy is being updated
(operation `updating`). A request that arrives waits for part of a micro-step at most. The engine's own thread is never
called from here; new weights reach it as a published version, which it swaps in at the start of a step.

Whatever fails here costs the training, not the engine.
"""

from __future__ import annotations

import functools
import logging
import shutil
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from drafter_online.idle import EngineState
    from rollspec.engine.vllm.learned import LearnedDrafts

logger = logging.getLogger("rollspec")

TICK_SECONDS = 0.05
"""Between two looks at the engine while it is busy."""

QUIET_SECONDS = 0.05
"""Without a step for this long, the engine has no request running."""


class OnlineTraining:
    """One worker's training thread."""

    def __init__(self, learned: LearnedDrafts, worker: Any) -> None:
        self.learned = learned
        self.config = learned.bridge.config.drafter
        self.updating = False
        self.published: int | None = None
        self.error: str | None = None
        self.acceptance: list[float] = []  # of the latest training windows, per training-time-test step
        self._rewards: deque[tuple[str, float]] = deque(maxlen=1 << 16)
        self._asleep = False
        self._stepped = time.perf_counter()
        self._inside = False
        self._version = -1
        self._stop = threading.Event()
        self._trainer: Any = None
        self._idle: Any = None
        self._vllm_config = worker.vllm_config
        folder = self.config.dir or learned.bridge.config.history.dir
        self.folder = Path(folder) / "drafter" if folder else Path(tempfile.mkdtemp(prefix="rollspec-drafter-"))
        self._lock = threading.Lock()  # of the trainer
        self._watch(worker)
        self._offer_promoted()
        self._thread = threading.Thread(target=self._run, name="rollspec-drafter", daemon=True)
        self._thread.start()

    # ---- what the engine's thread says ------------------------------------------------------------------------------

    def step_begins(self) -> None:
        """The engine computes."""
        self._inside = True
        self._stepped = time.perf_counter()

    def step_ended(self) -> None:
        """The engine has computed."""
        self._inside = False
        self._stepped = time.perf_counter()

    def reward(self, items: list[tuple[str, str, float]]) -> None:
        """Rewards by (prompt key, response key), for the samples of these responses."""
        self._rewards.extend((f"{prompt}:{response}", value) for prompt, response, value in items)

    def info(self) -> dict[str, Any]:
        """What was trained so far."""
        out: dict[str, Any] = {"published": self.published, "error": self.error, "folder": str(self.folder)}
        if self._trainer is not None:
            c, i = self._trainer.counts, self._idle.counts
            out |= {
                "steps": c.steps,
                "tokens": c.tokens,
                "preempted": c.preempted,
                "loss": self._trainer.last_loss if c.steps else None,
                "samples": len(self._trainer.buffer),
                "idle_seconds": i.available,
                "harvested_seconds": i.harvested,
                "latency_ms": 1e3 * max(i.latencies, default=0.0),
                "acceptance": self.acceptance,
            }
        return out

    def save(self, folder: Path) -> None:
        """Copy buffer, training state and versions to `folder`, for the job's checkpoint; waits for a micro-step."""
        with self._lock:
            if self._trainer is None:
                return
            self._trainer.checkpoint()
            self._trainer.checkpoints.wait()
            self._trainer.buffer.save(self.folder / "buffer")
            shutil.copytree(self.folder, folder, dirs_exist_ok=True)

    def load(self, folder: Path) -> bool:
        """Go on from a copy that `save` made; False where there is none, or training has begun here."""
        with self._lock:
            if self._trainer is not None or not folder.is_dir():
                return False
            shutil.copytree(folder, self.folder, dirs_exist_ok=True)
        self._offer_promoted()
        return True

    def _offer_promoted(self) -> None:
        """The engine starts with the head that it was given; the version that was promoted last is better."""
        from drafter_online.versions import Versions

        store = Versions(self.folder / "versions")
        number = store.promoted()
        if number is not None and self.learned.swapper is not None:
            self.learned.swapper.offer(store.path(number))

    def stop(self) -> None:
        """End the thread; it is a daemon, so nothing waits for it."""
        self._stop.set()

    def _watch(self, worker: Any) -> None:
        """Know when the engine's memory is taken away (sleep mode)."""
        for name, asleep in (("sleep", True), ("wake_up", False)):
            method = getattr(worker, name, None)
            if method is None:
                continue

            @functools.wraps(method)
            def watched(*args: Any, _method: Any = method, _asleep: bool = asleep, **kwargs: Any) -> Any:
                if _asleep:
                    self._asleep = True
                out = _method(*args, **kwargs)
                self._asleep = _asleep
                return out

            setattr(worker, name, watched)

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stop.wait(TICK_SECONDS):
                worked = True
                while worked and not self._stop.is_set():
                    with self._lock:
                        self._feed()
                        worked = self._trainer is not None and self._tick()
                        if worked:
                            self._publish()
        except Exception as e:
            self.error = f"{type(e).__name__}: {e}"
            faults = self.learned.bridge.faults
            faults[f"drafter training: {self.error}"] = 1
            logger.warning("rollspec: the drafter is not trained from now on (%s).", self.error, exc_info=e)

    def _feed(self) -> None:
        """Move captured samples into the buffer; the trainer is made when the first ones come."""
        capture = self.learned.capture
        if capture is None or self._forbidden():
            return
        if capture.ready:
            if self._trainer is None:
                self._make()
            from drafter_online.buffer import add_all

            add_all(self._trainer.buffer, capture.take(64))
        if self._trainer is not None and self._rewards:
            self._trainer.buffer.reward({k: v for k, v in (self._rewards.popleft() for _ in range(len(self._rewards)))})

    def _make(self) -> None:
        from drafter_online import head as heads
        from drafter_online.buffer import Buffer, BufferConfig
        from drafter_online.idle import Idle, IdleConfig
        from drafter_online.model import Eagle3
        from drafter_online.trainer import DrafterTraining, Trainer

        model = str(self.learned.drafter.draft_model_config.model)
        head = heads.load(model, str(self._vllm_config.model_config.model))
        buffer = Buffer.load(self.folder / "buffer", BufferConfig(max_bytes=self.config.buffer_bytes))
        trainer = Trainer(
            Eagle3(head),
            buffer,
            DrafterTraining(**self.config.training),
            checkpoints=self.folder / "state",
            device=self.learned.runner.device,
        )
        trainer.resume()
        self._idle = Idle(IdleConfig(step_bytes=self.config.step_bytes))
        self._trainer = trainer  # last: other threads look whether it is there

    def _forbidden(self) -> bool:
        quiet = time.perf_counter() - self._stepped > QUIET_SECONDS and not self._inside
        return self._asleep or self.updating or not quiet

    def _state(self) -> EngineState:
        from drafter_online.idle import EngineState

        running = int(self._inside or time.perf_counter() - self._stepped < QUIET_SECONDS)
        free = None
        if self.learned.runner.device.type == "cuda":
            free = int(torch.cuda.mem_get_info()[0])
        return EngineState(awake=not self._asleep, running=running, updating=self.updating, free_bytes=free)

    def _tick(self) -> bool:
        """One micro-step, if it may run; whether it did its work."""
        self._refresh()
        report = self._idle.tick(self._state, self._trainer.micro_step)
        if report is None or report.skipped is not None:
            return False
        self.acceptance = report.acceptance.rates
        return True

    def _refresh(self) -> None:
        """The head in training follows the policy's embedding, norm and LM head."""
        version = self.learned.bridge.proposer.version
        if version == self._version:
            return
        self._version = version
        from drafter_online import head as heads

        weights = {n: w.float() for n, w in target_weights(self.learned.runner).items()}
        heads.refresh(self._trainer.drafter.head, **weights)

    def _publish(self) -> None:
        """Every so many optimiser steps, what was learned is offered to the engine."""
        steps = self._trainer.counts.steps
        swapper = self.learned.swapper
        if not steps or steps % self.config.publish_every or swapper is None or swapper.busy:
            return
        from drafter_online.versions import Versions

        store = Versions(self.folder / "versions")
        number = self._trainer.publish(store, self.learned.runner.dtype)
        self.published = number
        self._trainer.buffer.save(self.folder / "buffer")
        swapper.offer(store.path(number))


def target_weights(runner: Any) -> dict[str, torch.Tensor]:
    """The target's embedding [V, H], final norm [H] and LM head [V, H], which a head under training uses."""
    target = runner.get_model()
    inner = getattr(target, "model", target)
    vocabulary = int(runner.model_config.get_vocab_size())  # vLLM pads the tensors for its shards
    parts = {"embed": inner.embed_tokens, "norm": inner.norm, "lm_head": getattr(target, "lm_head", None)}
    weights = {n: m.weight.detach() for n, m in parts.items() if getattr(m, "weight", None) is not None}
    return {n: w if n == "norm" else w[:vocabulary] for n, w in weights.items()}
