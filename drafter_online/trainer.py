"""Training a drafter one micro-step at a time, so that an engine on the same machine can pre-empt it at any moment.

    trainer = Trainer(Eagle3(head.load("head/")), buffer, DrafterTraining(), checkpoints="state/")
    trainer.resume()
    while idle():
        trainer.micro_step(interrupt=request_waits)
    number = trainer.publish(Versions("versions/"))

A micro-step is one forward and backward over one packed sequence. Until its optimiser step it changes nothing but the
gradients: it can be preempted or fail anywhere, and the next one draws the same data again.
"""

from __future__ import annotations

import gc
import importlib.metadata
import logging
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field

from drafter_online import losses
from drafter_online.buffer import Buffer
from drafter_online.checkpoint import Checkpoints
from drafter_online.errors import Preempted, TrainingError
from drafter_online.leap import Leap
from drafter_online.model import TrainedDrafter
from drafter_online.modes import evaluating, normal_mode
from drafter_online.objective import Acceptance, LossTerms, Result, evaluate
from drafter_online.optimizer import MasterWeights
from drafter_online.packing import Batch, pack
from drafter_online.recipes import TTT_STEPS
from drafter_online.samples import Sample

if TYPE_CHECKING:
    from drafter_online.versions import Versions

log = logging.getLogger(__name__)
SMALLEST_BATCH = 64  # tokens: running out of memory does not shrink a batch below this


@dataclass(frozen=True)
class StepReport:
    """What a micro-step did. `skipped`: why it changed nothing, None when it did its work."""

    tokens: int = 0
    terms: dict[str, float] = field(default_factory=dict)
    acceptance: Acceptance = field(default_factory=lambda: Acceptance(0, ()))
    skipped: Literal["empty", "preempted", "not_finite", "out_of_memory"] | None = None


@dataclass
class TrainerCounts:
    """Since the training began, over restarts."""

    micro_steps: int = 0
    steps: int = 0
    tokens: int = 0
    preempted: int = 0
    not_finite: int = 0
    restored: int = 0
    out_of_memory: int = 0
    failed: int = 0


def provenance() -> dict[str, str]:
    """Versions of what the weights were made with."""
    found = {}
    for name in ("rollspec", "speculators", "torch", "transformers", "safetensors"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


class DrafterTraining(LossTerms):
    """Every knob of training."""

    learning_rate: float = Field(1e-3, gt=0, description="Of AdamW, after warm-up; constant: the target never settles.")
    warmup_steps: int = Field(20, ge=0, description="Optimiser steps over which the learning rate grows from 0.")
    clip_norm: float = Field(1.0, gt=0, description="Largest norm of the gradient.")
    ttt_steps: int = Field(
        TTT_STEPS, ge=1, le=8, description="Training-time-test steps: drafted tokens a column is trained for."
    )
    batch_tokens: int = Field(2048, ge=16, description="Tokens packed into one micro-step.")
    window_tokens: int = Field(512, ge=16, description="Longest window of a response.")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="Of the weights; bf16 keeps fp32 master weights. `auto`: fp32 on the CPU, else bf16."
    )
    leap: float = Field(
        0.0, ge=0, description="Publish weights extrapolated by this many publication intervals (Leap+Verify)."
    )
    update_interval: int = Field(
        0,
        ge=0,
        description="Versions of the policy per version of the drafter, whose training waits for them (ReSpec); 0: it "
        "never waits.",
    )
    max_bad_steps: int = Field(
        3, ge=1, description="Steps with a loss that is not finite, in a row, before going back."
    )
    checkpoint_every: int = Field(50, ge=1, description="Optimiser steps between checkpoints.")
    seed: int = Field(0, ge=0, description="Seed of what is drawn.")


class Trainer:
    """Trains one drafter from one buffer, on `device`; `parent`: the version its weights come from. Without
    `checkpoints`, a folder, the last good state is kept in memory only.
    """

    def __init__(
        self,
        drafter: TrainedDrafter,
        buffer: Buffer,
        config: DrafterTraining | None = None,
        *,
        checkpoints: Path | str | None = None,
        device: Any = "cpu",
        parent: int | None = None,
    ) -> None:
        self.drafter = drafter
        self.buffer = buffer
        self.config = config or DrafterTraining()
        self.steps = 1 if drafter.kind == "draft_model" else self.config.ttt_steps
        """Training-time-test steps the drafter is run for; a model of sequences has one."""
        self.checkpoints = Checkpoints(checkpoints) if checkpoints is not None else None
        self.parent = parent
        self.counts = TrainerCounts()
        self._rng = random.Random(self.config.seed)
        self.leap = Leap(self.config.leap)
        self.last_loss = math.nan
        self.rate = 1.0
        """What the learning rate is multiplied by from now on; the caller's to set, and not kept in checkpoints."""
        self.batch_tokens = self.config.batch_tokens
        self._bad_in_a_row = 0
        self._build(device)
        self._good = self._master_weights.state()

    def _build(self, device: Any) -> None:
        self.device = torch.device(device)
        wants_bf16 = self.config.precision == "bf16" or (self.config.precision == "auto" and self.device.type != "cpu")
        self.dtype = torch.bfloat16 if wants_bf16 else torch.float32
        with normal_mode():
            self.drafter.module.to(self.device, self.dtype).train()
            self._master_weights = MasterWeights(self.drafter.module, self.config.learning_rate)

    def to(self, device: Any) -> None:
        """Go on with the same state on another device."""
        state = self._master_weights.state()
        self._build(device)
        self._master_weights.restore(state)

    def lends(self) -> None:
        """Something else uses the device: it gets the memory that torch keeps for later."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # ---- a micro-step -----------------------------------------------------------------------------------------------

    @normal_mode()
    def micro_step(self, interrupt: Callable[[], bool] | None = None) -> StepReport:
        """One forward and backward, and an optimiser step where it is due. `interrupt` is asked before every
        training-time-test step and before the backward pass; True stops here, and nothing is changed.

        Raises:
            TrainingError: the loss was not finite too often, and there is nothing good to go back to.
            Exception: whatever else the forward or backward raised, with gradients and random state as before it.
        """
        before = self._rng.getstate()
        try:
            batch = self._draw()
            if batch is None:
                return StepReport(skipped="empty")
            result = self._forward(batch, interrupt)
            if not math.isfinite(result.terms["loss"]):
                return self._bad(batch, result)
            if interrupt is not None and interrupt():
                raise Preempted
            torch.autograd.backward(result.loss)
        except Preempted:
            self._undo(before)
            self.counts.preempted += 1
            return StepReport(skipped="preempted")
        except torch.OutOfMemoryError:
            self._undo(before)
            return self._out_of_memory()
        except Exception:
            self._undo(before)
            self.counts.failed += 1
            raise
        warm = min(1.0, (self.counts.steps + 1) / max(1, self.config.warmup_steps))
        if not self._master_weights.step(self.rate * warm, self.config.clip_norm):
            return self._bad(batch, result)
        self._bad_in_a_row = 0
        self.last_loss = result.terms["loss"]
        self.counts.steps += 1
        self.counts.micro_steps += 1
        self.counts.tokens += batch.tokens
        if self.counts.steps % self.config.checkpoint_every == 0:
            self.checkpoint()
        return StepReport(batch.tokens, result.terms, result.acceptance)

    def _draw(self) -> Batch | None:
        windows = self.buffer.draw(self._rng, self.batch_tokens, min(self.config.window_tokens, self.batch_tokens))
        if not windows:
            return None
        rewards = torch.tensor([math.nan if w.reward is None else w.reward for w in windows])
        mean, std = self.buffer.rewards.moments
        weights = losses.reward_weights(rewards, mean, std, self.config.reward_beta).tolist()
        batch = pack(windows, weights, steps=self.steps, rejected=self.config.rejected > 0)
        return batch.to(self.device, self.dtype)

    def _forward(self, batch: Batch, interrupt: Callable[[], bool] | None) -> Result:
        states = self.drafter.states(batch, self.steps, interrupt)
        return evaluate(self.drafter, states, batch, self.config, interrupt)

    def _undo(self, rng: Any) -> None:
        self._rng.setstate(rng)
        self._master_weights.clear()

    # ---- what can go wrong ------------------------------------------------------------------------------------------

    def _bad(self, batch: Batch, result: Result) -> StepReport:
        """A loss or gradient that is not finite: skip it, and after too many in a row go back to the last good weights.

        Random state and counters stay as they are: the same data would give the same loss.
        """
        self.counts.not_finite += 1
        self._bad_in_a_row += 1
        if self._bad_in_a_row >= self.config.max_bad_steps:
            log.warning(
                "drafter-online: %d losses in a row were not finite; training goes back to the last good state",
                self._bad_in_a_row,
            )
            if not all(bool(t.isfinite().all()) for t in self._good.values()):
                raise TrainingError(
                    "the loss is not finite and there is no good state to go back to; use another head."
                )
            self._master_weights.restore(self._good)
            self.counts.restored += 1
            self._bad_in_a_row = 0
        return StepReport(batch.tokens, result.terms, result.acceptance, "not_finite")

    def _out_of_memory(self) -> StepReport:
        """Half the batch from now on."""
        self.counts.out_of_memory += 1
        if self.batch_tokens > SMALLEST_BATCH:
            self.batch_tokens = max(SMALLEST_BATCH, self.batch_tokens // 2)
            log.warning("drafter-online: out of memory; micro-steps of %d tokens from now on", self.batch_tokens)
        gc.collect()
        self.lends()
        return StepReport(skipped="out_of_memory")

    # ---- evaluation -------------------------------------------------------------------------------------------------

    def evaluate(self, samples: Iterable[Sample], tokens: int = 4096) -> Acceptance:
        """What the drafter achieves on samples as they are: whole, without replayed errors, in evaluation mode."""
        total = Acceptance(0, (0,) * self.steps)
        with normal_mode(), evaluating(self.drafter.module):
            for some in _batches(samples, tokens):
                batch = pack(some, steps=self.steps).to(self.device, self.dtype)
                total = total + self._forward(batch, None).acceptance
        return total

    # ---- state ------------------------------------------------------------------------------------------------------

    def checkpoint(self) -> None:
        """Keep the present weights as the last good ones, and write all that decides the next step, but for the buffer,
        in the background where there is a folder.
        """
        self._good = self._master_weights.state()
        if self.checkpoints is not None:
            record = {
                "rng": self._rng.getstate(),
                "counts": vars(self.counts).copy(),
                "batch_tokens": self.batch_tokens,
                "parent": self.parent,
                "base": self.drafter.base,
                "config": self.config.model_dump(mode="json"),
                "last_loss": self.last_loss,
                "provenance": provenance(),
            }
            self.checkpoints.save(self.counts.micro_steps, self._good, record)

    def resume(self, checkpoints: Checkpoints | None = None) -> bool:
        """Go on from the newest whole checkpoint, of this training or of other `checkpoints`. False: there is none.

        Raises:
            TrainingError: it is of another drafter or target, or every checkpoint is damaged.
        """
        checkpoints = checkpoints or self.checkpoints
        found = checkpoints.load() if checkpoints is not None else None
        if found is None:
            return False
        tensors, record = found
        if record["base"] != self.drafter.base:
            raise TrainingError(
                f"the checkpoint is for the target {record['base']!r}, not {self.drafter.base!r}; give another folder."
            )
        version, state, gauss = record["rng"]
        counts = TrainerCounts(**record["counts"])  # first: what does not fit changes nothing
        self._master_weights.restore(tensors)
        self._good = tensors
        self._rng.setstate((version, tuple(state), gauss))
        self.counts = counts
        self.batch_tokens = min(record["batch_tokens"], self.config.batch_tokens)
        self.parent = record["parent"]
        self.last_loss = record["last_loss"]
        return True

    def close(self) -> None:
        """Wait for a checkpoint that is being written."""
        if self.checkpoints is not None:
            self.checkpoints.wait()

    # ---- publishing -------------------------------------------------------------------------------------------------

    def publish(self, versions: Versions, dtype: Any = None, target_version: int | None = None) -> int:
        """Publish the present weights as a version, in `dtype` (the training's when None), and return its number.

        Raises:
            VersionError: the weights are not finite, or the store cannot be written. Training can continue.
        """
        weights, leapt = self.leap.ahead(self.drafter.weights(), versions)
        number = versions.publish(
            {n: t.to(dtype) if dtype is not None and t.is_floating_point() else t for n, t in weights.items()},
            self.drafter.config(dtype),
            base=self.drafter.base,
            target_version=self.buffer.newest if target_version is None else target_version,
            kind=self.drafter.kind,
            parent=self.parent,
            provenance={
                **provenance(),
                "counts": vars(self.counts).copy(),
                "loss": self.last_loss if math.isfinite(self.last_loss) else None,
                "training": self.config.model_dump(mode="json"),
                "samples": len(self.buffer),
                "leap": self.leap.by if leapt else 0.0,
            },
        )
        self.parent = number
        self.leap.last = number if leapt else None
        return number


def _batches(samples: Iterable[Sample], tokens: int) -> Iterator[list[Sample]]:
    """Samples in order, as many at a time as have `tokens` tokens together, one at least."""
    some: list[Sample] = []
    for sample in samples:
        if some and sum(map(len, some)) + len(sample) > tokens:
            yield some
            some = []
        some.append(sample)
    if some:
        yield some
