"""Runs a job to its end, bounded, watched and cleaned up after.

    result = run_job(job, on_step=print)        # raises JobFailed with a cause; nothing of the job is left running

The run folder holds the whole log (`job.log`), the measurements (`metrics.jsonl`) and their origin (`run.json`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from drafter_online import files
from examples.demo.job import Job
from examples.demo.processes import MARKER, Family, remove_segments
from examples.demo.provenance import describe
from rollspec.errors import RollspecError
from rollspec.machine import now
from rollspec.telemetry.runs import METRICS, PROVENANCE, Row, parse_row

LOG = "job.log"
RAY_LOGS = "ray_logs"  # only of a run that failed
POLL_SECONDS = 0.25
ENOUGH = "has enough steps"


class JobFailed(RollspecError):  # noqa: N818 - reads as what happened
    """A job ended without finishing its steps. `tail` is the end of its log."""

    def __init__(self, message: str, tail: str = "") -> None:
        super().__init__(message)
        self.tail = tail


@dataclass(frozen=True)
class JobResult:
    """A finished job."""

    folder: Path
    steps: int
    seconds: float


@dataclass
class MetricsTail:
    """Reads the lines that were added to a metrics file since the last call; leaves a half-written line alone."""

    path: Path
    offset: int = 0
    rows: list[Row] = field(default_factory=list)

    def read(self) -> list[Row]:
        """The new rows."""
        new: list[Row] = []
        with suppress(OSError), self.path.open("rb") as f:
            f.seek(self.offset)
            data = f.read()
            end = data.rfind(b"\n") + 1
            self.offset += end
            for line in data[:end].splitlines():
                with suppress(ValueError):  # the report names a corrupted line; watching does not stop for it
                    obj = json.loads(line)
                    if isinstance(obj, dict):
                        new.append(parse_row(obj)[1])
        self.rows += new
        return new


def run_job(
    job: Job,
    *,
    timeout: float = 900.0,
    stall: float = 420.0,
    on_step: Callable[[Row], None] = lambda row: None,
    on_tick: Callable[[], None] = lambda: None,
    enough: Callable[[], bool] = lambda: False,
) -> JobResult:
    """Run `job` and return when it has finished.

    Args:
        job: what to run.
        timeout: seconds for the whole job.
        stall: seconds without a new step, start-up included, after which the job counts as hung.
        on_step: called with the metrics of each training step as it ends.
        on_tick: called a few times a second.
        enough: asked after each step; a job that has enough steps is ended, and counts as finished.

    Raises:
        JobFailed: the job exited early, timed out, stalled or finished fewer steps; one sentence of cause.
        KeyboardInterrupt: passed on after everything was stopped (Ctrl-C, SIGTERM and SIGHUP alike).
    """
    folder = job.folder
    _clear(folder)
    provenance = describe(job)
    _write(folder, {**provenance, "status": "running"})
    scratch = tempfile.mkdtemp(prefix="rs-")  # short: Ray puts unix sockets in it, whose paths are limited
    marker = uuid.uuid4().hex
    environment = {k: v for k, v in os.environ.items() if k not in job.removed}
    environment |= {**job.environment, MARKER: marker, "RAY_TMPDIR": scratch}
    started = time.monotonic()
    tail = MetricsTail(folder / METRICS)

    def ends_here() -> bool:
        return len(tail.rows) < job.total_steps and enough()  # after its own last step it ends by itself

    status, cause = "failed", ""
    with (folder / LOG).open("wb") as log, _signals_as_interrupt():
        process = subprocess.Popen(
            job.command, cwd=job.cwd, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        family = Family(process.pid, marker)
        try:
            cause = _watch(process, family, tail, started, timeout, stall, on_step, on_tick, ends_here)
            if cause == ENOUGH:
                status, cause = "finished", ""
            elif not cause:
                status, cause = _outcome(process.returncode, len(tail.rows), job)
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        finally:
            with _undisturbed():
                family.stop()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(5)
                remove_segments(family.segments)
                if status == "failed":
                    _keep_ray_logs(Path(scratch), folder)
                shutil.rmtree(scratch, ignore_errors=True)
                seconds = time.monotonic() - started
                ended = {"status": status, "exit_code": process.returncode, "wall_seconds": round(seconds, 1)}
                _write(folder, {**provenance, **ended, "cause": cause or None, "ended": now()})
    if status != "finished":
        text = log_tail(folder / LOG)
        raise JobFailed(f"rollspec: the {job.name} job {cause}; its whole log is {folder / LOG}.", text)
    return JobResult(folder, len(tail.rows), seconds)


def finished_run(folder: Path, settings_hash: str) -> bool:
    """Whether `folder` holds a finished run of the same settings, so that it need not be run again."""
    data = provenance_of(folder)
    same = data.get("settings_hash") == settings_hash and data.get("status") == "finished"
    return same and (folder / METRICS).is_file()


def provenance_of(folder: Path) -> dict[str, Any]:
    """What a run's `run.json` says; nothing where there is none."""
    with suppress(OSError, ValueError):
        found = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def log_tail(path: Path, lines: int = 30, width: int = 240) -> str:
    """The last lines of a log without its colour codes."""
    try:
        with path.open("rb") as f:
            f.seek(max(0, path.stat().st_size - 256 * 1024))
            text = f.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n")
    return "\n".join(line[:width] for line in [ln for ln in plain.split("\n") if ln.strip()][-lines:])


def _watch(
    process: subprocess.Popen[bytes],
    family: Family,
    tail: MetricsTail,
    started: float,
    timeout: float,
    stall: float,
    on_step: Callable[[Row], None],
    on_tick: Callable[[], None],
    enough: Callable[[], bool],
) -> str:
    """Follow the job until it ends; why it must be stopped, or nothing when it ended by itself or had its last step."""
    last_step, next_look = time.monotonic(), 0.0
    while True:
        ended = process.poll() is not None
        for row in tail.read():
            last_step = time.monotonic()
            on_step(row)
            if enough():
                return ENOUGH
        if ended:
            return ""
        now = time.monotonic()
        if now >= next_look:
            family.look()
            next_look = now + 1.0
        if now - started > timeout:
            return f"was stopped after {timeout:.0f} s, its time limit, with {len(tail.rows)} steps done"
        if now - last_step > stall:
            return f"was stopped because no training step ended for {stall:.0f} s ({len(tail.rows)} steps done)"
        on_tick()
        time.sleep(POLL_SECONDS)


def _outcome(code: int | None, steps: int, job: Job) -> tuple[str, str]:
    if code == 0 and steps >= job.total_steps:
        return "finished", ""
    if code == 0:
        return "failed", f"ended by itself after {steps} of {job.total_steps} steps"
    how = f"was killed by signal {signal.Signals(-code).name}" if code and code < 0 else f"exited with status {code}"
    return "failed", f"{how} after {steps} of {job.total_steps} steps ({_last_error(job.folder / LOG)})"


def _last_error(path: Path) -> str:
    """The last line of the log that names an exception: with Ray in between, the root cause comes last."""
    pattern = re.compile(r"^(?:\([^)]*\)\s*)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)(?:\(\w+\))?: .+)")
    for line in reversed(log_tail(path, lines=400, width=2000).split("\n")):
        if match := pattern.match(line.strip()):
            return match.group(1)[:300]
    return "the log names no exception"


def _clear(folder: Path) -> None:
    """Remove what an earlier, unfinished or different run left, so that its numbers cannot be taken for this one's."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (METRICS, PROVENANCE, LOG):
            (folder / name).unlink(missing_ok=True)
        shutil.rmtree(folder / RAY_LOGS, ignore_errors=True)
    except OSError as e:
        raise RollspecError(f"rollspec: {folder} cannot be written ({e.strerror or e}); choose another --out.") from e


def _write(folder: Path, data: dict[str, Any]) -> None:
    files.replace(folder / PROVENANCE, f"{json.dumps(data, indent=2)}\n".encode())


def _keep_ray_logs(scratch: Path, folder: Path) -> None:
    """Ray's own logs say why a worker died; large ones are left out."""
    target = folder / RAY_LOGS
    with suppress(OSError):
        for log in scratch.glob("ray/session_2*/logs/*"):
            if log.is_file() and 0 < log.stat().st_size < 1 << 20:
                target.mkdir(exist_ok=True)
                shutil.copy(log, target / log.name)


@contextmanager
def _signals_as_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP end a run as Ctrl-C does: through `finally`. Only possible in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {s: signal.signal(s, interrupt) for s in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """A second Ctrl-C must not cut the clean-up short and leave workers behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {s: signal.signal(s, signal.SIG_IGN) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
