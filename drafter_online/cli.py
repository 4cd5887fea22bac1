"""The `drafter-online` command.

    drafter-online make-head --model MODEL --out HEAD      a head trained on the model's own text, in an hour
    drafter-online init --target MODEL --out HEAD          a fresh EAGLE-3 head that vLLM can serve
    drafter-online convert SRC --target MODEL --out HEAD   a SpecForge/SGLang head in the same format
    drafter-online buffer stats DIR                        what a saved buffer holds
    drafter-online train --buffer DIR --head HEAD --out VERSIONS
    drafter-online versions list|show|promote|rollback DIR
    drafter-online serve --target MODEL --dir DIR          a daemon that trains on what servers send it

Every table has `--json`. What goes wrong on purpose is one sentence, with exit status 2.
"""

from __future__ import annotations

import json
import logging
import signal
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from drafter_online import console, make_head_cli, train_cli, versions_cli
from drafter_online.activity import give_way

log = logging.getLogger("drafter_online")

app = console.group("Train a draft model for speculative decoding while its target is being served or trained.")
app.add_typer(train_cli.buffer_app, name="buffer")
app.add_typer(versions_cli.app, name="versions")


@app.command()
def init(
    target: console.Target,
    out: Annotated[Path, typer.Option("--out", help="Folder for the head.")],
    aux: console.Aux = None,
    draft_vocab: Annotated[
        int | None, typer.Option("--draft-vocab", help="Tokens the head can draft; the whole vocabulary when left out.")
    ] = None,
    counts: Annotated[
        Path | None, typer.Option("--counts", help="JSON of token id -> count, or a saved buffer, for --draft-vocab.")
    ] = None,
    dtype: console.Dtype = "bfloat16",
    as_json: console.Json = False,
) -> None:
    """Make a fresh EAGLE-3 head for a target, in the format that speculators and vLLM read."""
    from drafter_online import head as heads

    made = heads.fresh(
        target,
        aux=console.aux_layers(aux),
        draft_vocab_size=draft_vocab,
        counts=_counts(counts) if counts else None,
    )
    _wrote(heads.save(made, out, console.torch_dtype(dtype)), made, as_json)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Folder of the head to read.")],
    target: console.Target,
    out: Annotated[Path, typer.Option("--out", help="Folder for the converted head.")],
    dtype: console.Dtype = "bfloat16",
    as_json: console.Json = False,
) -> None:
    """Read a head in SpecForge/SGLang layout (`midlayer.*`) or speculators' and write it in speculators format."""
    from drafter_online import head as heads

    read = heads.load(source, target)
    _wrote(heads.save(read, out, console.torch_dtype(dtype)), read, as_json)


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
    console.show_facts(facts, as_json)


app.command()(make_head_cli.make_head)
app.command()(train_cli.train)


@app.command()
def serve(
    target: console.Target,
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
    threads: console.Threads = None,
    nice: Annotated[
        int, typer.Option("--nice", min=0, max=19, help="Give way to other processes on the CPU by this much.")
    ] = 10,
    options: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="KEY=VALUE", help="Another knob of the daemon (docs/service.md)."),
    ] = None,
    overrides: console.Overrides = None,
) -> None:
    """Train continually on what `vllm serve` processes send, and publish versions that they swap in."""
    stop = threading.Event()
    # Before anything slow: a start that is interrupted ends as cleanly.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())

    from drafter_online import wire
    from drafter_online.http import HttpServer
    from drafter_online.service import Service
    from drafter_online.settings import settings

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    for noisy in ("httpx", "uvicorn", "transformers", "speculators"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    given = console.values(options) | {
        "target": target, "dir": folder, "head": head, "endpoint": endpoint, "token_file": token_file,
        "device": device, "training": console.values(overrides, "training."),
    }  # fmt: skip
    config = settings(given)
    token = wire.read_token(token_file)
    if port >= 0:
        wire.check_endpoint(host, token)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    if device == "cpu" and nice:
        give_way(nice)
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


def _counts(path: Path) -> dict[int, int]:
    from drafter_online.errors import HeadError

    if path.is_dir():
        return dict(train_cli.saved_buffer(path).token_counts())
    try:
        return {int(t): int(n) for t, n in json.loads(path.read_text()).items()}
    except (OSError, ValueError, AttributeError, TypeError) as e:
        raise HeadError(f"--counts {path} is neither a buffer nor a JSON of id -> count ({e}).") from e


if __name__ == "__main__":
    app()
