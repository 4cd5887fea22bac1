"""`drafter-online make-head`: its options, its progress bars and its table."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.logging import RichHandler
from rich.progress import TaskID

from drafter_online import console

log = logging.getLogger(__name__)

NOTE_SECONDS = 60.0
"""Between two lines of progress where no terminal shows a bar."""


def make_head(
    model: Annotated[str, typer.Option("--model", help="Folder (or hub name) of the target's checkpoint.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the head; called again with it, resumes there.")],
    minutes: Annotated[float, typer.Option("--minutes", min=0.05, help="For all calls with this --out together.")] = 60,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help="JSONL, Parquet (`prompt` or `messages`) or text; 360 built in when left out."),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", min=1, help="Response tokens that are enough; else a third of the time.")
    ] = None,
    temperature: Annotated[float, typer.Option("--temperature", min=0, help="Of the responses, as in your job.")] = 1.0,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=8, help="Longest response.")] = 256,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Requests that the engine runs at once.")] = 16,
    draft_vocab: Annotated[
        int | None,
        typer.Option("--draft-vocab", min=1, help="Tokens the head can draft; 99.9 % of the text (8192 at most)."),
    ] = None,
    aux: console.Aux = None,
    hold_out: Annotated[
        float, typer.Option("--hold-out", min=0.01, max=0.9, help="Share of the prompts that it is measured on.")
    ] = 0.1,
    buffer_gib: Annotated[float, typer.Option("--buffer-gib", min=0.001, help="Most memory of samples.")] = 2.0,
    device: Annotated[str, typer.Option("--device", help="Torch device that trains.")] = "cpu",
    threads: console.Threads = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of text, weights and training.")] = 0,
    overrides: console.Overrides = None,
    engine: Annotated[
        list[str] | None,
        typer.Option("--engine", metavar="KEY=VALUE", help="An argument of vLLM's LLM, such as dtype."),
    ] = None,
    dtype: console.Dtype = "bfloat16",
    as_json: console.Json = False,
) -> None:
    """Make a trained EAGLE-3 head for a model: generate with vLLM, train, evaluate, write what `vllm serve` loads."""
    from drafter_online.make_head import Options, make

    weights = console.torch_dtype(dtype)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    options = Options(
        model=model,
        out=out,
        minutes=minutes,
        prompts=prompts,
        tokens=tokens,
        temperature=temperature,
        max_tokens=max_tokens,
        batch=batch,
        buffer_bytes=int(buffer_gib * 2**30),
        aux=console.aux_layers(aux),
        draft_vocab=draft_vocab,
        hold_out=hold_out,
        device=device,
        dtype=weights,
        seed=seed,
        training=console.values(overrides, "training."),
        engine=console.values(engine),
    )
    with console.bars(quiet=as_json) as progress:
        on_terminal = progress.console.is_terminal
        handlers = [RichHandler(console=progress.console)] if on_terminal else None
        form = "%(message)s" if on_terminal else "%(asctime)s %(message)s"
        logging.basicConfig(level=logging.WARNING, format=form, handlers=handlers)
        logging.getLogger("drafter_online").setLevel(logging.INFO)
        tasks: dict[str, TaskID] = {}
        noted = time.monotonic()

        def note(phase: str, done: float, total: float, text: str) -> None:
            nonlocal noted
            if not on_terminal and time.monotonic() - noted > NOTE_SECONDS:
                noted = time.monotonic()
                log.info("drafter-online: %s, %.0f of %.0f s: %s", phase, done, total, text)
            if phase not in tasks:
                tasks[phase] = progress.add_task(phase, text=text)
            progress.update(tasks[phase], completed=done, total=total, text=text)

        facts = make(options, note)
    console.show_facts(facts if as_json else _table(facts), as_json)


def _table(facts: dict[str, Any]) -> dict[str, Any]:
    """What one wants to know at a glance."""
    shown = ("before", "after", "max_acceptance")
    out = {k: v for k, v in facts.items() if k not in ("curve", "counts", "finished", *shown)}
    for name in shown:
        out[f"acceptance length, {name}"] = facts[name]["acceptance_length"]
        out[f"acceptance rates, {name}"] = facts[name]["rates"]
    return out
