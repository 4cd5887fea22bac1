"""From a model to a draft head that pays from the first request: generate with the engine, train, evaluate, write.

    DIR/config.json, model.safetensors    the head, as vLLM and `speculators` read it
    DIR/make-head.json                    what was done, and the training curve; written as it goes
    DIR/buffer/                           the target's text, with its hidden states
    DIR/work/                             the engine's job and log, the head before training, checkpoints of training

The minutes are those of all calls with the same DIR together: one that was killed, or is called again with more of
them, resumes where it was.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drafter_online import generate, prompts
from drafter_online import head as heads
from drafter_online.architecture import aux_layers, base_of, check_room, target_config
from drafter_online.buffer import Buffer, BufferConfig
from drafter_online.errors import HeadError, TrainingError
from drafter_online.files import oserror_as, replace, try_lock
from drafter_online.held_out import covered, first, max_acceptance, split
from drafter_online.model import Eagle3
from drafter_online.objective import Acceptance
from drafter_online.samples import Sample
from drafter_online.settings import training_of
from drafter_online.trainer import DrafterTraining, Trainer
from drafter_online.vocabulary import DRAFTED

log = logging.getLogger("drafter_online")

Note = Callable[[str, float, float, str], None]
"""Gets progress: phase, seconds done, seconds in all, and the text beside them."""

RECORD = "make-head.json"
GENERATING = 1 / 3  # of the minutes
LEAST_SECONDS = 2.0  # for less the engine is not started again
COVERS, MULTIPLE = 0.999, 64  # of a draft vocabulary that is not given
EVALUATED = 16_384  # held-out tokens that acceptance is measured on
PACKED = 2048  # tokens evaluated at once
EVALUATIONS = 20  # during training, and never for more than a tenth of its time
OPTIMISER_STEPS = 2000  # that batches are made small for, where there is little time
SMALLEST = 512  # tokens of a batch
POOR = 1.5  # tokens a step: one that always drafts the likeliest token hardly earns its passes below it
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
COOLS_FROM = 0.5  # share of the time, after which the learning rate falls along a cosine: the target is at rest


@dataclass(frozen=True)
class Options:
    """What to make, and of what."""

    model: str
    out: Path
    minutes: float
    prompts: Path | None = None  # built-in instructions when None
    tokens: int | None = None  # response tokens that are enough; None: what a third of the minutes gives
    temperature: float = 1.0
    max_tokens: int = 256
    batch: int = 16  # requests that run at once
    buffer_bytes: int = 2 << 30
    aux: Sequence[int] | None = None
    draft_vocab: int | None = None
    hold_out: float = 0.1  # of the prompts
    device: str = "cpu"
    dtype: Any = None  # of the weights as written; as trained when None
    seed: int = 0
    training: Mapping[str, Any] = field(default_factory=dict)  # of `DrafterTraining`
    engine: Mapping[str, Any] = field(default_factory=dict)  # of vLLM's `LLM`


def make(options: Options, note: Note = lambda *_: None) -> dict[str, Any]:
    """Make the head, or resume it, and return what `make-head.json` says.

    Raises:
        HeadError: the model has no room for a head or cannot be read, DIR belongs to other work, or its disk is full.
        TrainingError: a knob, the prompts, the engine or the samples are of no use.
    """
    target = target_config(options.model)
    check_room(options.model, target)
    config = training_of({"seed": options.seed, **options.training})
    with oserror_as(HeadError, f"--out {options.out} cannot be written"):
        lock = try_lock(options.out / "work" / "lock")
    if lock is None:
        raise HeadError(f"another make-head works in {options.out}; wait for it, or give another --out.")
    try:
        work = _Work(options, target, config, note)
        work.generate()
        work.train()
        return work.record
    except OSError as e:
        if e.errno not in FULL:
            raise
        raise HeadError(
            f"{options.out} cannot be written any more ({e.strerror}); free space there and call "
            "again: it resumes from what is whole."
        ) from e
    finally:
        os.close(lock)


class _Work:
    """One call: what is in DIR, and what is left to do."""

    def __init__(self, options: Options, target: Any, config: DrafterTraining, note: Note) -> None:
        self.options, self.target, self.config, self.note = options, target, config, note
        self.folder = options.out / "work"
        aux = list(options.aux or aux_layers(target.num_hidden_layers))
        base = {"target": options.model, "base": base_of(target), "aux_layers": aux}
        self.record: dict[str, Any] = {**base, "finished": False, "generating_seconds": 0.0, "requests": 0}
        self.record |= {"training_seconds": 0.0, "cpu_seconds": 0.0, "curve": []}
        path = options.out / RECORD
        if path.exists():
            try:
                self.record |= json.loads(path.read_bytes())
            except ValueError as e:
                raise HeadError(f"{path} is damaged ({e}); delete it to start anew.") from e
            self.record["finished"] = False
            for name, value in base.items():
                if self.record[name] != value:
                    raise HeadError(
                        f"{options.out} is of a head with {name} {self.record[name]}, not {value}; give another --out."
                    )
        self.buffer = Buffer.load(options.out / "buffer", BufferConfig(max_bytes=options.buffer_bytes))
        self._collect()  # of a call that was killed

    def save(self, **facts: Any) -> None:
        """Put facts on record."""
        self.record |= facts
        replace(self.options.out / RECORD, json.dumps(self.record, indent=2).encode())

    # ---- what the target says ---------------------------------------------------------------------------------------

    def generate(self) -> None:
        """Have the engine generate what is missing."""
        o, done = self.options, self.buffer.token_counts().total()
        seconds = 60 * o.minutes * GENERATING - self.record["generating_seconds"]
        enough = seconds < LEAST_SECONDS or self.buffer.bytes >= o.buffer_bytes or done >= (o.tokens or math.inf)
        if enough and len(self.buffer):
            log.info("drafter-online: %d response tokens are in %s already", done, o.out / "buffer")
            return
        positions = int(self.target.max_position_embeddings)
        rows = prompts.read(o.prompts, o.seed)
        tokens, left_out = prompts.tokenized(rows, o.model, positions - o.max_tokens)
        most = max(map(max, tokens))
        if most >= self.target.vocab_size:
            raise TrainingError(
                f"a prompt has token {most}, but the model's vocabulary has {self.target.vocab_size}; "
                "use the tokenizer that belongs to the model."
            )
        given = {"prompts": len(tokens), "prompts_too_long": left_out, "built_in_prompts": o.prompts is None}
        self.save(**given, temperature=o.temperature, max_tokens=o.max_tokens)
        capture = self.folder / "capture"
        if not (capture / heads.CONFIG).exists():
            heads.save(heads.fresh(o.model, aux=self.record["aux_layers"], random=True), capture)  # it never drafts
        job = generate.GenerationJob(
            o.model,
            str(capture),
            tokens,
            o.temperature,
            o.max_tokens,
            max_model_len=max(map(len, tokens)) + o.max_tokens,
            seed=o.seed + self.record["requests"],  # not the same text again
            batch=o.batch,
            seconds=max(seconds, LEAST_SECONDS),
            tokens=None if o.tokens is None else max(1, o.tokens - done),
            bytes=max(1, o.buffer_bytes - self.buffer.bytes),
            engine=dict(o.engine),
        )

        def report(p: dict[str, Any]) -> None:
            spent = float(p.get("seconds", 0.0))
            speed = f", {p['tokens'] / spent:.0f} tokens/s" if spent else ""
            text = f"{done + p['tokens']} tokens{speed}" if p.get("state") == "generating" else "the engine starts"
            self.note("generating", spent, job.seconds, text)

        try:
            generate.run(job, self.folder / "engine", report)
        finally:
            self._collect()
        if not len(self.buffer):
            raise TrainingError(
                f"the engine recorded no response of {o.model} in {job.seconds:.0f} s; give more "
                "--minutes, or prompts with longer answers."
            )

    def _collect(self) -> None:
        found = generate.collect(self.folder / "engine", self.buffer, self.options.out / "buffer")
        if found:
            spent = found.get("start_seconds", 0.0) + found.get("seconds", 0.0)
            self.save(
                generating_seconds=round(self.record["generating_seconds"] + spent, 1),
                requests=self.record["requests"] + found.get("requests", 0),
            )
            if lost := found["refused"] + found.get("skipped", 0) + found.get("dropped", 0):
                log.warning("drafter-online: %d responses were not recorded", lost)

    # ---- the head ---------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Train for the minutes that are left, and write the head."""
        o, r = self.options, self.record
        kept, held = split(self.buffer, o.hold_out)
        if not held:
            raise TrainingError("all samples are of one prompt, and none is left to measure on; give more.")
        drafter = Eagle3(self._untrained(kept, held))
        trainer = Trainer(drafter, kept, self.config, checkpoints=self.folder / "state", device=o.device)
        resumed = trainer.resume()
        r["curve"] = [c for c in r["curve"] if c["micro_steps"] <= trainer.counts.micro_steps]
        shown = first(held, EVALUATED)
        began = time.monotonic()
        start = trainer.evaluate(shown, PACKED)
        evaluating = time.monotonic() - began
        total = max(60 * o.minutes * GENERATING, 60 * o.minutes - r["generating_seconds"])
        if not resumed:
            self._small_batches(trainer, total, evaluating, sum(map(len, shown)))
            limit = max_acceptance(trainer, shown)
            log.log(
                logging.WARNING if limit.length < POOR else logging.INFO,
                "drafter-online: at temperature %g the best head reaches %.2f tokens a step on held-out text%s",
                o.temperature,
                limit.length,
                ", too few to pay: the policy's entropy is too high for any" if limit.length < POOR else "",
            )
            self.save(
                before=_shown(start),
                max_acceptance=_shown(limit),
                samples=len(kept),
                held_out=len(held),
                hold_out=o.hold_out,
                response_tokens=self.buffer.token_counts().total(),
                batch_tokens=trainer.batch_tokens,
            )
        every = max(total / EVALUATIONS, 10 * evaluating)
        latest, looked = start, time.monotonic()
        self._began = (looked - r["training_seconds"], time.process_time() - r["cpu_seconds"])
        while (done := time.monotonic() - self._began[0]) < total - evaluating:
            trainer.rate = cooled(done / total)
            trainer.micro_step()
            text = f"loss {trainer.last_loss:.3f}, acceptance length {latest.length:.2f}"
            self.note("training", done, total, text)
            if time.monotonic() - looked > every:
                latest, looked = self._look(trainer, shown), time.monotonic()
        latest = self._look(trainer, shown)
        trainer.close()
        heads.save(drafter.head, o.out, o.dtype)
        last = trainer.last_loss if math.isfinite(trainer.last_loss) else None
        self.save(head=str(o.out), after=_shown(latest), loss=last, counts=vars(trainer.counts).copy(), finished=True)

    def _look(self, trainer: Trainer, held: list[Sample]) -> Acceptance:
        """Measure acceptance on held-out prompts; put it on record, and all that resuming needs on disk."""
        trainer.checkpoint()
        found = trainer.evaluate(held, PACKED)
        seconds = {
            "training_seconds": round(time.monotonic() - self._began[0], 1),
            "cpu_seconds": round(time.process_time() - self._began[1], 1),
        }
        c = trainer.counts
        loss = round(trainer.last_loss, 4) if math.isfinite(trainer.last_loss) else None
        at = {"micro_steps": c.micro_steps, "tokens": c.tokens, **seconds, "loss": loss, **_shown(found)}
        before = [p for p in self.record["curve"] if p["micro_steps"] < c.micro_steps]
        self.save(**seconds, curve=[*before, at])
        return found

    def _small_batches(self, trainer: Trainer, seconds: float, evaluating: float, tokens: int) -> None:
        """Batches that leave time for `OPTIMISER_STEPS`, where their size is not given; an evaluation is the forward
        pass of a micro-step, and about a third of it.
        """
        if "batch_tokens" not in self.options.training and tokens:
            room = seconds * tokens / max(evaluating, 1e-3) / 3 / OPTIMISER_STEPS
            trainer.batch_tokens = max(SMALLEST, min(trainer.batch_tokens, int(room) // 64 * 64))

    def _untrained(self, kept: Buffer, held: list[Sample]) -> Any:
        """The head that training starts from; once made, its vocabulary is fixed."""
        o, folder = self.options, self.folder / "untrained"
        if not (folder / heads.CONFIG).exists():
            counts = kept.token_counts()
            size = o.draft_vocab or draft_vocabulary(counts, self.target.vocab_size)
            made = heads.fresh(
                o.model,
                aux=self.record["aux_layers"],
                draft_vocab_size=size,
                counts=counts,
                speculative_tokens=self.config.ttt_steps,
                seed=o.seed,
            )
            heads.save(made, folder)
        head = heads.load(folder, o.model)
        size = head.draft_vocab_size
        if o.draft_vocab is not None and size != min(o.draft_vocab, self.target.vocab_size):
            raise HeadError(
                f"the head in {o.out} was begun with --draft-vocab {size}, not {o.draft_vocab}; give another --out."
            )
        coverage = getattr(head.config, heads.OURS)["vocabulary_coverage"]
        self.save(draft_vocab_size=size, vocabulary_coverage=coverage, held_out_coverage=round(covered(head, held), 6))
        log.info(
            "drafter-online: the head drafts %d of %d tokens, %.4f of the text it learns and %.4f of the held-out text",
            size,
            self.target.vocab_size,
            coverage,
            self.record["held_out_coverage"],
        )
        return head


def cooled(share: float) -> float:
    """Of the learning rate, when so much of the time is over."""
    return 0.5 + 0.5 * math.cos(math.pi * min(1.0, max(0.0, share - COOLS_FROM) / (1 - COOLS_FROM)))


def draft_vocabulary(counts: Mapping[int, int], vocabulary: int) -> int:
    """How many tokens a head should draft: those that make up `COVERS` of `counts`, `DRAFTED` at most, rounded up.

    Tokens seen once are the share of new text that is not among `counts` (Good and Turing). Where that is too much for
    `COVERS`, it is `DRAFTED`: the first ids, which tokenizers order by frequency, fill the map up.
    """
    total, size, have = sum(counts.values()), 0, 0
    if list(counts.values()).count(1) > (1 - COVERS) * total:
        return min(vocabulary, DRAFTED)
    for n in sorted(counts.values(), reverse=True):
        if have >= COVERS * total or size >= DRAFTED:
            break
        size, have = size + 1, have + n
    return min(vocabulary, MULTIPLE * max(1, math.ceil(size / MULTIPLE)))


def _shown(found: Acceptance) -> dict[str, Any]:
    return {"acceptance_length": round(found.length, 4), "rates": [round(r, 4) for r in found.rates]}
