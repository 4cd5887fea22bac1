"""Runs the parts one by one within the minutes and keeps what is done: a run that was cut off resumes where it was.

The JSON is written after every part. A later call with the same commit, device and versions takes its finished parts
over; parts that failed or were left out are tried again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks import harness
from benchmarks.gpu import claims, machine, page
from benchmarks.gpu.plan import Part, choose, parts
from benchmarks.harness import RESULTS, ROOT

FORMAT = "rollspec-gpu-1"
GRACE, LEAST = 1.5, 240.0
"""A part may take this many times its minutes, and at least so many seconds, then it is ended."""


_running: set[subprocess.Popen[bytes]] = set()


@dataclass(frozen=True)
class Options:
    """What a call asks for."""

    minutes: float = 20.0
    device: machine.Device = "cuda"
    vllm: bool = True
    fresh: bool = False  # measure again what is finished
    only: tuple[str, ...] = ()  # names of parts, or their beginnings
    model: Path | None = None  # real checkpoint for identity and acceptance
    head: Path | None = None  # its draft head
    prompts: Path | None = None  # for it; built-in ones otherwise
    engine: Mapping[str, Any] = field(default_factory=dict)  # options of every `vllm.LLM`
    together: int = 1  # parts that run at once, of those whose times do not matter
    commit: str | None = None  # of a copy without its `.git`, made from a clean tree
    out: Path | None = None


def run(options: Options) -> Path | None:
    """Measure, and write the JSON and the page beside it; None where there is no such device."""
    console = Console(stderr=True)
    reason = machine.absent(options.device)
    if reason is not None:
        console.print(f"rollspec: {reason}", highlight=False)
        return None
    # `timeout` and `kill` end the part that runs, too, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    out = options.out or RESULTS / ("gpu.json" if options.device == "cuda" else "gpu-dry.json")
    result = begin(options, out)
    wanted = [
        p
        for p in parts(options.device, options.head is not None)
        if not options.only or p.name.startswith(options.only)
    ]
    done = {name for name, found in result["parts"].items() if found["state"] == "done"}
    chosen, left = choose(wanted, options.minutes, done, options.vllm and machine.has_vllm())
    ends = time.monotonic() + 60 * options.minutes
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f} of {task.total:.0f}"),
        TimeElapsedColumn(), console=console, transient=True,
    ) as bar:  # fmt: skip
        task, writing = bar.add_task("", total=len(chosen)), threading.Lock()

        def finish(part: Part) -> None:
            bar.update(task, description=part.title)
            if time.monotonic() + 60 * part.minutes > ends and part is not chosen[0]:
                left[part.name] = f"needs about {part.minutes:.1f} minutes, and fewer were left"
            else:
                found = execute(part, options, out)
                with writing:
                    result["parts"][part.name] = found
                    save(result, out)
                bar.console.print(line(part, found), highlight=False)
            bar.advance(task)

        for timed, some in groupby(chosen, lambda p: p.timed):
            if timed or options.together == 1:
                for part in some:
                    finish(part)
                continue
            with ThreadPoolExecutor(options.together) as pool:
                try:
                    list(pool.map(finish, some))
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    for process in list(_running):
                        _end(process)
                    raise
    for name, why in left.items():
        if result["parts"].get(name, {}).get("state") != "failed":
            result["parts"][name] = {"state": "left out", "reason": why, "title": _title(wanted, name)}
    save(result, out)
    console.print(table(result))
    console.print(f"written: {out}\nwritten: {out.with_suffix('.html')}", highlight=False, soft_wrap=True)
    return out


def begin(options: Options, out: Path) -> dict[str, Any]:
    """The result so far: that of an earlier call on the same commit, device and versions, or an empty one."""
    result = {
        "benchmark": "gpu",
        "format": FORMAT,
        "dry": options.device == "cpu",
        **machine.revision(options.commit),
        "device": machine.describe(options.device),
        "versions": machine.versions(),
        "model": str(options.model) if options.model else "the demo's policy",
        "head": _text(options.head),
        "prompts": _text(options.prompts),
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "minutes": options.minutes,
        "parts": {},
    }
    if options.fresh or not out.is_file():
        return result
    try:
        earlier = json.loads(out.read_text())
    except ValueError:
        return result
    same = ("format", "dry", "commit", "clean", "device", "versions", "model", "head", "prompts")
    # A tree that differs from its commit may have changed since.
    if earlier.get("clean") and all(earlier.get(name) == result[name] for name in same):
        result["parts"] = earlier["parts"]
        result["began"] = earlier["began"]
    return result


def execute(part: Part, options: Options, out: Path) -> dict[str, Any]:
    """One part in a process of its own, ended where it takes far too long."""
    limit = max(LEAST, GRACE * 60 * part.minutes)
    began, engine = time.monotonic(), _engine(part, options)
    log = out.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, log.open("ab") as said:
        given, found = Path(folder) / "spec.json", Path(folder) / "found.json"
        models = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "rollspec" / "gpu"
        files = {name: _text(getattr(options, name)) for name in ("model", "head", "prompts")}
        given.write_text(json.dumps(part.spec(options.device, str(models), engine=engine, **files)))
        said.write(f"\n=== {part.name}\n".encode())
        said.flush()
        folders = [str(ROOT), str(ROOT / "integrations"), os.environ.get("PYTHONPATH", "")]
        if not machine.is_installed():
            folders.append(str(machine.plugin(Path(folder) / "plugin")))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in folders if p)}
        if options.together > 1:
            environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.child", part.function, str(given), str(found)],
            cwd=ROOT, env=environment, stdout=said, stderr=said, start_new_session=True,
        )  # fmt: skip
        _running.add(process)
        try:
            process.wait(limit)
            result: dict[str, Any] = (
                json.loads(found.read_text())
                if found.is_file()
                else {"state": "failed", "reason": f"its process ended with status {process.returncode}; see {log}"}
            )
        except subprocess.TimeoutExpired:
            result = {"state": "failed", "reason": f"it did not end within {limit:.0f} s; see {log}"}
        finally:
            _end(process)
            _running.discard(process)
    return result | {"engine": engine, "title": part.title, "seconds": round(time.monotonic() - began, 1)}


def _engine(part: Part, options: Options) -> dict[str, Any]:
    """Options of a part's engines; those of parts that run together share the memory."""
    shares = not part.timed and options.together > 1
    memory = {"gpu_memory_utilization": 0.8 / options.together, "kv_cache_memory_bytes": 3 << 30} if shares else {}
    return memory | dict(options.engine)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part with all that it started: an engine's processes are in its group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def save(result: dict[str, Any], out: Path) -> None:
    """Write the JSON with its claims, and the page."""
    result["claims"] = claims.of(result)
    harness.save("gpu", result, out)
    out.with_suffix(".html").write_text(page.render(result), encoding="utf-8")


def line(part: Part, found: dict[str, Any]) -> str:
    """What became of a part, in a line."""
    return f"{found['state']:8} {part.name} ({found['seconds']:.0f} s)" + (
        f": {found['reason']}" if "reason" in found else ""
    )


def table(result: dict[str, Any]) -> Table:
    """The claims, one a row."""
    out = Table(title=claims.headline(result))
    for column in ("claim", "goal", "measured", ""):
        out.add_column(column)
    for claim in result["claims"]:
        out.add_row(claim["what"], claim["goal"], claim["measured"], claim["state"])
    return out


def _title(wanted: list[Part], name: str) -> str:
    return next(p.title for p in wanted if p.name == name)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path.resolve())
