"""`drafter-online train` and `buffer stats`: offline training on samples that a job or a daemon saved."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from drafter_online.console import Dtype, Json, Overrides, bars, group, show_facts, show_table, torch_dtype, values

if TYPE_CHECKING:
    from drafter_online.buffer import Buffer

buffer_app = group("Look into a saved buffer of training samples.")


@buffer_app.command("stats")
def buffer_stats(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a saved buffer.")], as_json: Json = False
) -> None:
    """What a saved buffer holds: per policy version, the tail, what was dropped."""
    stats = saved_buffer(folder).stats()
    if as_json:
        typer.echo(json.dumps(stats, indent=2))
        return
    rows = [
        (v, str(s["samples"]), str(s["tokens"]), decimal(s["bytes"]), str(s["rewarded"]))
        for v, s in stats["versions"].items()
    ]
    show_table(("policy version", "samples", "response tokens", "bytes", "rewarded"), rows)
    plain = {k: v for k, v in stats.items() if k != "versions"}
    for name in ("bytes", "max_bytes", "tail_bytes"):
        plain[name] = decimal(plain[name])
    show_facts(plain, False)


def train(
    buffer: Annotated[Path, typer.Option("--buffer", help="Folder of a saved buffer.")],
    out: Annotated[Path, typer.Option("--out", help="Folder of versions to publish to.")],
    head: Annotated[
        Path | None, typer.Option("--head", help="EAGLE-3 head to start from, when there is no version in --out.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", help="Instead of a head: a causal language model to distil into.")
    ] = None,
    target: Annotated[str | None, typer.Option("--target", help="The target; needed with --model.")] = None,
    state: Annotated[Path | None, typer.Option("--state", help="Folder for checkpoints; resumed from.")] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Micro-steps to run.")] = 200,
    domain: Annotated[
        str | None, typer.Option("--domain", help="Train on requests of this domain only: a specialist.")
    ] = None,
    hold_out: Annotated[
        float, typer.Option("--hold-out", min=0, max=0.9, help="Share of the prompts that acceptance is measured on.")
    ] = 0.1,
    overrides: Overrides = None,
    device: Annotated[str, typer.Option("--device", help="Torch device.")] = "cpu",
    dtype: Dtype = "bfloat16",
    as_json: Json = False,
) -> None:
    """Train on a saved buffer and publish a version; acceptance is measured before and after on held-out prompts."""
    from drafter_online.errors import TrainingError
    from drafter_online.held_out import split
    from drafter_online.settings import training_of
    from drafter_online.trainer import Trainer
    from drafter_online.versions import Versions

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    config = training_of(values(overrides, "training."))
    store = Versions(out)
    all_samples = list(saved_buffer(buffer))
    if domain is not None:
        there = sorted({s.domain for s in all_samples if s.domain})
        all_samples = [s for s in all_samples if s.domain == domain]
        if not all_samples:
            raise TrainingError(
                f"the buffer {buffer} has no sample of the domain {domain!r}; it has "
                f"{', '.join(there) or 'none with a domain'}."
            )
    kept, held = split(all_samples, hold_out)
    if not len(kept):
        raise TrainingError(f"the buffer {buffer} has nothing to train on; collect samples first.")
    drafter, parent = _drafter(store, head, model, target)
    trainer = Trainer(drafter, kept, config, checkpoints=state, device=device, parent=parent)
    resumed = trainer.resume()
    before = trainer.evaluate(held)
    with bars(quiet=as_json) as progress:
        task = progress.add_task("training", total=steps, text="")
        for i in range(1, steps + 1):
            loss = trainer.micro_step().terms.get("loss", trainer.last_loss)
            progress.update(task, advance=1, text=f"{i}/{steps} loss {loss:.3f}")
    after = trainer.evaluate(held)
    number = trainer.publish(store, torch_dtype(dtype))
    if state is not None:
        trainer.checkpoint()  # after publishing: the next run's versions are this one's children
        trainer.close()
    facts = {
        "version": number,
        "resumed": resumed,
        "counts": dataclasses.asdict(trainer.counts),
        "loss": trainer.last_loss,
        "samples": len(kept),
        "held_out": len(held),
        "acceptance_length_before": round(before.length, 4),
        "acceptance_length_after": round(after.length, 4),
        "rates_before": [round(r, 4) for r in before.rates],
        "rates_after": [round(r, 4) for r in after.rates],
    }
    show_facts(facts, as_json)


def saved_buffer(folder: Path) -> Buffer:
    """A saved buffer, whatever its size.

    Raises:
        BufferFileError: there is none.
    """
    from drafter_online.buffer import INDEX, Buffer, BufferConfig
    from drafter_online.errors import BufferFileError

    if not (folder / INDEX).is_file():
        raise BufferFileError(f"there is no saved buffer in {folder} ({INDEX} is missing).")
    return Buffer.load(folder, BufferConfig(max_bytes=1 << 62))


def _drafter(store: Any, head: Path | None, model: Path | None, target: str | None) -> tuple[Any, int | None]:
    """What is trained, and the version it comes from: the newest good one in the store, else what was given."""
    from drafter_online.errors import HeadError
    from drafter_online.model import load

    parent = store.candidate()
    if parent is not None:
        store.load(parent)  # verified before it is built upon
    if model is not None and target is None:
        raise HeadError("--model needs --target: a draft model does not say what it drafts for.")
    source = store.path(parent) if parent is not None else model or head
    if source is None:
        raise HeadError("nothing to train: give --head, --model, or a store with a version in it.")
    return load(source, target), parent
