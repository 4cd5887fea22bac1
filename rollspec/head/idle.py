"""Trains the drafter inside the worker while the engine has nothing to do: capture -> training -> swap, in one engine.

A thread asks twenty times a second whether a micro-step may run (`drafter_online.idle`): never while the engine sleeps,
within `QUIET_SECONDS` of a step, or while the trainer uses the machine (operation `updating`). The engine's own thread
is never called from here; new weights reach it as a published version, which it swaps in at the start of a step.
"""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from drafter_online.buffer import Buffer, BufferConfig, add_all
from drafter_online.errors import BufferFileError, DrafterError, TrainingError
from drafter_online.idle import Idle
from drafter_online.job_checkpoint import copy_state, finish
from drafter_online.model import load
from drafter_online.trainer import DrafterTraining, Trainer
from drafter_online.versions import Versions
from drafter_online.worth import WhenItPays, Worth
from rollspec.head.draft_head import DraftHead
from rollspec.head.training import TICK_SECONDS, HeadTraining

QUIET_SECONDS = 0.05
"""Without a step for this long, the engine has no request running."""

LOCK_SECONDS = 10.0
"""How long saving and loading wait for a micro-step to end; one that hangs must not hold up the job."""


class IdleTraining(HeadTraining):
    """One worker's training thread."""

    def __init__(self, head: DraftHead) -> None:
        super().__init__(head)
        self.published: int | None = None
        self._report: Any = None  # of the latest micro-step that did its work (`drafter_online.trainer`)
        self._stepped = time.perf_counter()
        self._inside = False
        self._version = -1
        self.when = WhenItPays(self.config.publish_every) if self.config.train_when == "pays" else None
        self._due = False  # `publish_every` steps were made, and what was learned pays and is not published yet
        self._published_at = 0  # steps, a multiple of `publish_every`
        self.worth = Worth()
        self._trainer: Any = None
        self._idle: Any = None
        folder = self.config.dir or head.bridge.config.history.dir
        if folder is None:
            self._own = tempfile.TemporaryDirectory(prefix="rollspec-drafter-", ignore_cleanup_errors=True)
        self.folder = Path(self._own.name) if folder is None else folder / "drafter"
        self.store = Versions(self.folder / "versions")
        self._lock = threading.Lock()  # of the trainer
        self._offer_promoted()
        self._thread.start()

    # ---- what the engine's thread says ------------------------------------------------------------------------------

    def step_begins(self) -> None:
        """The engine computes, so the machine is not the trainer's any more."""
        self._watch(self._hangs())
        self._inside = True
        self.updating = False
        self._stepped = time.perf_counter()

    def step_ended(self) -> None:
        """The engine has computed."""
        if self._inside and self._idle is not None:
            self._idle.cost.step(time.perf_counter() - self._stepped)
        self._inside = False
        self._stepped = time.perf_counter()

    def observed(self, sampled: list[list[int]]) -> None:
        """What the requests of a step emitted, whose tokens are a training round's gain."""
        if self.when is not None:
            counts = [len(s) for s in sampled if s]
            self.when.served(sum(counts), len(counts), time.perf_counter() - self._stepped)

    def info(self) -> dict[str, Any]:
        """What was trained so far."""
        self._watch(self._hangs())
        out: dict[str, Any] = {"published": self.published, "error": self.error, "folder": str(self.folder)}
        if self._trainer is not None:
            c, i, report = self._trainer.counts, self._idle.counts, self._report
            out |= {
                "steps": c.steps,
                "tokens": c.tokens,
                "preempted": c.preempted,
                "loss": self._trainer.last_loss if c.steps else None,
                "samples": len(self._trainer.buffer),
                "idle_seconds": i.available,
                "used_seconds": i.used,
                "micro_steps": i.steps,
                "wasted_seconds": i.wasted,
                "idle_cost": self._idle.cost.share,
                "preempt_seconds": max(i.latencies, default=0.0),
                "preempt_p99_seconds": i.latency_p99,
                "micro_step_seconds": i.step_seconds,
                "step_age_seconds": self._idle.watch.age,
                "hangs": self._idle.watch.hangs,
                "terms": {k: v for k, v in report.terms.items() if k != "loss"} if report is not None else {},
                "acceptance": report.acceptance.rates if report is not None else [],
                "length": report.acceptance.length if report is not None else 1.0,
            }
            if self.when is not None:
                out |= {"rounds": self.when.rounds, "rounds_skipped": self.when.skipped}
        return out

    def save(self, folder: Path) -> bool:
        """Copy buffer, training state and versions to `folder`, for the job's checkpoint; waits for a micro-step.

        False where there is nothing, or the training does not give it: the checkpoint is then without it.
        """
        if not self._lock.acquire(timeout=LOCK_SECONDS):
            self._fault("saving", f"a training step has been running for more than {LOCK_SECONDS:g} s")
            return False
        try:
            if self._trainer is None:
                return False
            self._trainer.checkpoint()
            self._trainer.checkpoints.wait()
            self._trainer.buffer.save(self.folder / "buffer")
            copy_state(self.folder, folder)
            return True
        except (OSError, DrafterError) as e:  # a full disk, say; history and weights of the checkpoint are not ours
            self._fault("saving", str(e))
            return False
        finally:
            self._lock.release()

    def load(self, folder: Path) -> bool:
        """Resume from a copy that `save` made; False where there is none, or training has begun here."""
        if not folder.is_dir() or not self._lock.acquire(timeout=LOCK_SECONDS):
            return False
        try:
            if self._trainer is not None:
                return False
            finish(folder)
            copy_state(folder, self.folder, aside=True)
        except OSError as e:
            self._fault("loading", str(e))
            return False
        finally:
            self._lock.release()
        self._offer_promoted()
        return True

    def _offer_promoted(self) -> None:
        """The engine starts with the head that it was given; the version that was promoted last is better.

        It was promoted after a canary. A canary that ended with its engine has no verdict and is not taken.
        """
        number = self.store.promoted()
        if number is not None:
            self.head.swapper.offer(self.store.path(number), canary=False)

    def _hangs(self) -> str | None:
        return None if self._idle is None else self._idle.watch.hangs

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._stop.wait(TICK_SECONDS):
            worked = True
            while worked and not self._stop.is_set():
                with self._lock:
                    self._feed()
                    worked = self._trainer is not None and self._tick()
                    if self._due and (worked or self._wanted() is None):
                        self._publish()

    def _feed(self) -> None:
        """Move captured samples into the buffer; the trainer is made when the first ones come."""
        if self._wanted() is not None:
            return
        if self.capture.ready:
            if self._trainer is None:
                self._make()
            add_all(self._trainer.buffer, self.capture.take(64))
        if self._trainer is not None and self._rewards:
            self._trainer.buffer.reward(dict(self._rewards.popleft() for _ in range(len(self._rewards))))

    def _make(self) -> None:
        target = str(self.head.vllm_config.model_config.model)
        given = str(self.head.drafter.draft_model_config.model)
        training = DrafterTraining(**self.head.bridge.config.drafter_training)
        drafter = load(given, target, train_lm_head=training.train_lm_head)
        keep = BufferConfig(max_bytes=self.config.buffer_bytes)
        try:
            buffer = Buffer.load(self.folder / "buffer", keep)
        except BufferFileError as e:  # set aside
            self._fault("reading the buffer of", str(e))
            buffer = Buffer(keep)
        trainer = Trainer(
            drafter,
            buffer,
            training,
            checkpoints=self.folder / "state",
            device=self.head.runner.device,
        )
        try:
            trainer.resume()
        except TrainingError as e:
            self._fault("resuming", str(e))
        self.resumed = (trainer.counts.steps, trainer.counts.tokens)
        self._idle = Idle(time.perf_counter)
        self._trainer = trainer  # last: other threads look whether it is there

    def _wanted(self) -> float | None:
        """Since when the machine is the engine's or its trainer's; None where training may use it."""
        now = time.perf_counter()
        if self._inside or now - self._stepped <= QUIET_SECONDS:
            return self._stepped  # when it began or ended its last step
        return now if self.head.asleep or self.updating else None

    def _tick(self) -> bool:
        """One micro-step, if it may run; whether it did its work."""
        before, used = self._trainer.counts.steps, self._idle.counts.used
        if self.when is not None and not self.when.allows(before):
            return False
        self._refresh()
        report = self._idle.tick(self._wanted, self._trainer.micro_step)
        if self.when is not None:
            self.when.trained(self._idle.counts.used - used)
        if report is None or report.skipped is not None:
            return False
        self._report = report
        steps = self._trainer.counts.steps
        self.worth.observe(report.acceptance.length)
        if steps > before and steps % self.config.publish_every == 0 and not self._due:
            since = steps - self._published_at
            self._due = self.worth.pays(self._trainer.buffer, since, self.config.publish_every)
        return True

    def _refresh(self, again: bool = False) -> None:
        """The head in training follows the policy's embedding, norm and LM head; `again` where it did already."""
        version = self.head.bridge.engine.version
        if version == self._version and not again:
            return
        with self.head.reading:
            # Until then the head has those of the model's folder, or of the version before.
            if not self.head.asleep and (parts := self._target()) is not None:
                given = {n: w.float() for n, w in parts.items()}
                self._trainer.drafter.refresh(given, self._trainer.buffer.token_counts())
                self._version = version

    def _publish(self) -> None:
        """Offer what was learned to the engine, in the place of what it has not swapped in yet.

        Training continues while a version is on canary; the newest state at the end of the canary is published next.
        """
        swapper = self.head.swapper
        if not swapper.open:
            return
        self._due = False
        self._refresh(again=True)  # the token counts may have changed, though the policy did not
        try:
            number = self._trainer.publish(self.store, self.head.runner.dtype)
            self.published = number
            self._published_at = self._trainer.counts.steps // self.config.publish_every * self.config.publish_every
            self.worth.published()
            swapper.offer(self.store.path(number))
            self._trainer.buffer.save(self.folder / "buffer")
        except (OSError, DrafterError) as e:  # a store that is gone or full: tried again with the next version
            self._fault("publishing", str(e))
