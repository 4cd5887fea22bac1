"""The `drafter-online` command.

    drafter-online init --target MODEL --out HEAD          a fresh EAGLE-3 head that vLLM can serve
    drafter-online convert SRC --target MODEL --out HEAD   a SpecForge/SGLang head in the same format
    drafter-online buffer stats DIR                        what a saved buffer holds
    drafter-online train --buffer DIR --head HEAD --out VERSIONS
    drafter-online versions list|show|promote|rollback DIR
    drafter-online serve --target MODEL --dir DIR          a daemon that trains on what servers send it
    drafter-online keys FILE                               a CURVE key pair for an encrypted wire

Every table has `--json`. What goes wrong on purpose is one sentence, with exit status 2.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from drafter_online.errors import DrafterError

if TYPE_CHECKING:
    from drafter_online.trainer import DrafterTraining, Trainer

log = logging.getLogger("drafter_online")

USAGE = 2  # exit status of a mistake the user can mend


class _Group(TyperGroup):
    """Prints what the library raises on purpose as its one sentence."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except DrafterError as e:
            typer.echo(str(e), err=True)
            raise typer.Exit(USAGE) from e
        except ModuleNotFoundError as e:
            typer.echo(f"drafter-online: {e.name} is not installed; run pip install 'rollspec[drafter]'.", err=True)
            raise typer.Exit(USAGE) from e


def _app(text: str) -> typer.Typer:
    return typer.Typer(
        cls=_Group,
        help=text,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


app = _app("Train a draft model for speculative decoding while its target is being served or trained.")
buffer_app = _app("Look into a saved buffer of training samples.")
versions_app = _app("Look into a store of drafter versions, and decide about them.")
app.add_typer(buffer_app, name="buffer")
app.add_typer(versions_app, name="versions")

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Target = Annotated[str, typer.Option("--target", help="Folder (or hub name) of the target's checkpoint.")]
Store = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of versions.")]
Dtype = Annotated[str, typer.Option("--dtype", help="Of the weights as written: bfloat16, float16 or float32.")]


@app.command()
def init(
    target: Target,
    out: Annotated[Path, typer.Option("--out", help="Folder for the head.")],
    aux: Annotated[
        str | None, typer.Option("--aux", help="Auxiliary layers, e.g. 2,18,33; chosen when left out.")
    ] = None,
    draft_vocab: Annotated[
        int | None, typer.Option("--draft-vocab", help="Tokens the head can draft; the whole vocabulary when left out.")
    ] = None,
    counts: Annotated[
        Path | None, typer.Option("--counts", help="JSON of token id -> count, or a saved buffer, for --draft-vocab.")
    ] = None,
    layers: Annotated[int, typer.Option("--layers", min=1, help="Decoder layers of the head.")] = 1,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Draft length an engine uses unless told.")] = 3,
    seed: Annotated[int, typer.Option("--seed", help="Of the random weights.")] = 0,
    dtype: Dtype = "bfloat16",
    as_json: Json = False,
) -> None:
    """Make a fresh EAGLE-3 head for a target, in the format that speculators and vLLM read."""
    from drafter_online import head as heads

    made = heads.fresh(
        target,
        aux=_integers(aux) if aux else None,
        draft_vocab_size=draft_vocab,
        counts=_counts(counts) if counts else None,
        layers=layers,
        speculative_tokens=tokens,
        seed=seed,
    )
    _wrote(heads.save(made, out, _dtype(dtype)), made, as_json)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Folder of the head to read.")],
    target: Target,
    out: Annotated[Path, typer.Option("--out", help="Folder for the converted head.")],
    dtype: Dtype = "bfloat16",
    as_json: Json = False,
) -> None:
    """Read a head in SpecForge/SGLang layout (`midlayer.*`) or speculators' and write it in speculators format."""
    from drafter_online import head as heads

    read = heads.load(source, target)
    _wrote(heads.save(read, out, _dtype(dtype)), read, as_json)


def _wrote(folder: Path, head: Any, as_json: bool) -> None:
    from drafter_online import head as heads

    ours = heads.config_of(head)[heads.OURS]
    facts = {
        "head": str(folder),
        "base": ours["base"],
        "aux_layers": head.config.eagle_aux_hidden_state_layer_ids,
        "draft_vocab_size": head.draft_vocab_size,
        "vocabulary_coverage": ours["vocabulary_coverage"],
        "parameters": sum(t.numel() for t in heads.own_weights(head).values()),
    }
    _facts(facts, as_json)


@buffer_app.command("stats")
def buffer_stats(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a saved buffer.")], as_json: Json = False
) -> None:
    """What a saved buffer holds: per policy version, the tail, what was dropped."""
    stats = _buffer(folder).stats()
    if as_json:
        typer.echo(json.dumps(stats, indent=2))
        return
    rows = [
        (v, str(s["samples"]), str(s["tokens"]), _size(s["bytes"]), str(s["rewarded"]))
        for v, s in stats["versions"].items()
    ]
    _table(("policy version", "samples", "response tokens", "bytes", "rewarded"), rows)
    plain = {k: v for k, v in stats.items() if k != "versions"}
    for name in ("bytes", "max_bytes", "tail_bytes"):
        plain[name] = _size(plain[name])
    _facts(plain, False)


@app.command()
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
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A knob of training; may be repeated.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="Torch device.")] = "cpu",
    dtype: Dtype = "bfloat16",
    as_json: Json = False,
) -> None:
    """Train on a saved buffer and publish a version; acceptance is measured before and after on held-out prompts."""
    from drafter_online.buffer import Buffer, BufferConfig
    from drafter_online.errors import TrainingError
    from drafter_online.trainer import Trainer
    from drafter_online.versions import Versions

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    config = _training(overrides or [])
    store = Versions(out)
    all_samples = list(_buffer(buffer))
    if domain is not None:
        there = sorted({s.domain for s in all_samples if s.domain})
        all_samples = [s for s in all_samples if s.domain == domain]
        if not all_samples:
            raise TrainingError(
                f"drafter-online: the buffer {buffer} has no sample of the domain {domain!r}; it has "
                f"{', '.join(there) or 'none with a domain'}."
            )
    kept = Buffer(BufferConfig(max_bytes=1 << 62))
    held = [s for s in all_samples if _held_out(s.prompt_key or s.request_id, hold_out)]
    for sample in all_samples:
        if not any(sample is h for h in held):
            kept.add(sample)
    if not len(kept):
        raise TrainingError(f"drafter-online: the buffer {buffer} has nothing to train on; collect samples first.")
    drafter, parent = _drafter(store, head, model, target, config)
    trainer = Trainer(drafter, kept, config, checkpoints=state, device=device, parent=parent)
    resumed = trainer.resume()
    before = trainer.evaluate(held)
    _run(trainer, steps, quiet=as_json)
    after = trainer.evaluate(held)
    number = trainer.publish(store, _dtype(dtype))
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
    _facts(facts, as_json)


@app.command()
def serve(
    target: Target,
    folder: Annotated[
        Path, typer.Option("--dir", help="Folder of versions, checkpoints and samples; one daemon each.")
    ],
    head: Annotated[
        Path | None, typer.Option("--head", help="EAGLE-3 head to start from; a fresh one when left out.")
    ] = None,
    endpoint: Annotated[
        str, typer.Option("--endpoint", help="Where engines connect: tcp://HOST:PORT or ipc://PATH.")
    ] = "tcp://127.0.0.1:5765",
    host: Annotated[str, typer.Option("--host", help="Address of /status and /metrics.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Their port; 0 for any, -1 for none.")] = 8765,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="File with the token; DRAFTER_ONLINE_TOKEN when left out.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="Torch device that trains.")] = "cpu",
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="CPU threads that train; torch decides when left out.")
    ] = None,
    nice: Annotated[
        int, typer.Option("--nice", min=0, max=19, help="Give way to other processes on the CPU by this much.")
    ] = 10,
    options: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="KEY=VALUE", help="Another knob of the daemon (docs/service.md)."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A knob of training; may be repeated.")
    ] = None,
) -> None:
    """Train continually on what `vllm serve` processes send, and publish versions that they swap in."""
    import signal
    import threading
    import time

    from drafter_online import wire
    from drafter_online.http import HttpServer
    from drafter_online.service import Service
    from drafter_online.settings import settings

    stop = threading.Event()
    signals: list[int] = []

    def end(number: int, frame: Any) -> None:
        signals.append(number)
        stop.set()

    # Before anything slow: a start that is interrupted ends as cleanly.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    for noisy in ("httpx", "uvicorn", "transformers", "speculators"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    given: dict[str, Any] = {
        **_values(options or []),
        **{
            "target": target, "dir": folder, "head": head, "endpoint": endpoint, "token_file": token_file,
            "device": device, "training": _values(overrides or [], "training."),
        },
    }  # fmt: skip
    config = settings(given)
    token = wire.read_token(token_file)
    if port >= 0:
        wire.require_token(host, token)
    _be_modest(device, threads, nice)
    service = Service(config)
    http: HttpServer | None = None
    try:
        service.start()
        if port >= 0:
            http = HttpServer(service, host, port, token)
        where = f", metrics at {http.url}metrics" if http is not None else ""
        log.info("drafter-online: listening at %s%s.", service.hub.endpoint, where)
        reason = service.run(stop)
    finally:
        begin = time.monotonic()
        if http is not None:
            http.close()
        service.close()
    log.info("drafter-online: ended because %s; all is saved (%.1f s).", reason, time.monotonic() - begin)


def _be_modest(device: str, threads: int | None, nice: int) -> None:
    import os

    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    if device == "cpu" and nice:
        os.nice(nice)


def _run(trainer: Trainer, steps: int, quiet: bool) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as progress:
        task = progress.add_task("", total=steps, loss="-")
        for _ in range(steps):
            report = trainer.micro_step()
            progress.update(task, advance=1, loss=f"{report.terms.get('loss', trainer.last_loss):.3f}")


@versions_app.command("list")
def versions_list(store: Store, as_json: Json = False) -> None:
    """The versions in a store, oldest first, and what became of them."""
    from drafter_online.status import list_versions
    from drafter_online.versions import Versions

    versions = Versions(store)
    rows = list_versions(versions, versions.promoted())
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    _table(
        ("version", "of policy", "parent", "verdict", "created", "size"),
        [
            (str(r["version"]), "-", "-", "damaged", "-", "-")
            if "error" in r
            else (
                f"{r['version']}{' *' if r['promoted'] else ''}",
                str(r["target_version"]),
                str(r["parent"] or "-"),
                str(r["verdict"] or "-"),
                str(r["created"])[:19],
                _size(r["bytes"]),
            )
            for r in rows
        ],
        caption="* promoted; `show` says what is wrong with a damaged one",
    )


@versions_app.command("show")
def versions_show(
    store: Store, version: Annotated[int, typer.Argument(help="Its number.")], as_json: Json = False
) -> None:
    """Verify one version and show its manifest and its verdicts."""
    from drafter_online.versions import Versions

    versions = Versions(store)
    facts = dataclasses.asdict(versions.load(version).manifest)
    facts["events"] = [dataclasses.asdict(e) for e in versions.events() if e.version == version]
    if not as_json:
        facts["tensors"] = f"{len(facts['tensors'])}, all verified"
    _facts(facts, as_json)


@versions_app.command("promote")
def versions_promote(
    store: Store,
    version: Annotated[int, typer.Argument(help="Its number.")],
    reason: Annotated[str, typer.Option("--reason", help="Kept with the verdict.")] = "by hand",
    as_json: Json = False,
) -> None:
    """Verify a version and record that it is the one to run; retention then keeps it."""
    from drafter_online.versions import Versions

    versions = Versions(store)
    versions.load(version)
    event = versions.record(version, "promoted", reason)
    _decided(versions, event, f"version {version} is promoted", as_json)


@versions_app.command("rollback")
def versions_rollback(
    store: Store,
    version: Annotated[int | None, typer.Argument(help="Its number; the promoted one when left out.")] = None,
    reason: Annotated[str, typer.Option("--reason", help="Kept with the verdict.")] = "by hand",
    as_json: Json = False,
) -> None:
    """Record that a version must not run; the one promoted before it is the promoted one again."""
    from drafter_online.errors import VersionError
    from drafter_online.versions import Versions

    versions = Versions(store)
    number = version if version is not None else versions.promoted()
    if number is None:
        raise VersionError(f"drafter-online: no version in {store} is promoted, so there is nothing to roll back.")
    event = versions.record(number, "rolled_back", reason)
    now = versions.promoted()
    said = f"version {number} is rolled back; promoted is now {'none' if now is None else now}"
    _decided(versions, event, said, as_json)


def _decided(versions: Any, event: Any, said: str, as_json: bool) -> None:
    facts = {**dataclasses.asdict(event), "promoted": versions.promoted()}
    typer.echo(json.dumps(facts, indent=2) if as_json else said)


# ---- helpers --------------------------------------------------------------------------------------------------------


def _buffer(folder: Path) -> Any:
    from drafter_online.buffer import INDEX, Buffer, BufferConfig
    from drafter_online.errors import BufferFileError

    if not (folder / INDEX).is_file():
        raise BufferFileError(f"drafter-online: there is no saved buffer in {folder} ({INDEX} is missing).")
    return Buffer.load(folder, BufferConfig(max_bytes=1 << 62))


def _drafter(
    store: Any, head: Path | None, model: Path | None, target: str | None, config: DrafterTraining
) -> tuple[Any, int | None]:
    """What is trained, and the version it comes from: the newest good one in the store, else what was given."""
    from drafter_online import head as heads
    from drafter_online.errors import HeadError
    from drafter_online.model import DraftModel, Eagle3

    parent = store.candidate()
    if parent is not None:
        store.load(parent)  # verified before it is built upon
    if model is not None:
        import torch
        from transformers import AutoModelForCausalLM

        if target is None:
            raise HeadError("drafter-online: --model needs --target: a draft model does not say what it drafts for.")
        source = store.path(parent) if parent is not None else model
        return DraftModel(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), target), parent
    source = store.path(parent) if parent is not None else head
    if source is None:
        raise HeadError("drafter-online: nothing to train: give --head, --model, or a store with a version in it.")
    return Eagle3(heads.load(source, target), train_lm_head=config.train_lm_head), parent


def _training(overrides: list[str]) -> DrafterTraining:
    from drafter_online.settings import training_of

    return training_of(_values(overrides, "training."))


def _values(items: list[str], prefix: str = "") -> dict[str, Any]:
    """KEY=VALUE as a mapping; a value is JSON where it can be read as that."""
    values: dict[str, Any] = {}
    for item in items:
        name, _, text = item.partition("=")
        try:
            values[name.removeprefix(prefix)] = json.loads(text)
        except ValueError:
            values[name.removeprefix(prefix)] = text
    return values


def _held_out(key: str, share: float) -> bool:
    """By the prompt, so that no prompt is on both sides."""
    import hashlib

    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") < share * 2**32


def _integers(text: str) -> list[int]:
    from drafter_online.errors import HeadError

    try:
        return [int(x) for x in text.split(",")]
    except ValueError as e:
        raise HeadError(f"drafter-online: --aux {text!r} is not a list of layers such as 2,18,33.") from e


def _counts(path: Path) -> dict[int, int]:
    from drafter_online.errors import HeadError

    if path.is_dir():
        return dict(_buffer(path).token_counts())
    try:
        return {int(t): int(n) for t, n in json.loads(path.read_text()).items()}
    except (OSError, ValueError, AttributeError, TypeError) as e:
        raise HeadError(f"drafter-online: --counts {path} is neither a buffer nor a JSON of id -> count ({e}).") from e


def _dtype(name: str) -> Any:
    import torch

    from drafter_online.errors import HeadError

    if name not in ("bfloat16", "float16", "float32"):
        raise HeadError(f"drafter-online: --dtype {name!r} is not bfloat16, float16 or float32.")
    return getattr(torch, name)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def _facts(facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    plain = [(k, v if isinstance(v, str) else json.dumps(v)) for k, v in facts.items()]
    _table(("what", "value"), plain)


def _table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], caption: str | None = None) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(caption=caption, caption_justify="left", header_style="bold", pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, no_wrap=i == 0, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    Console().print(table)


if __name__ == "__main__":
    app()
