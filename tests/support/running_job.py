"""A whole job that a test kills: started without the demo's runner, which would clean up after it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from orphans import left_to_process_one

from examples.demo.job import Job
from examples.demo.processes import MARKER, Family


@dataclass
class RunningJob:
    """Its first process, every process of it, and its log."""

    process: subprocess.Popen[bytes]
    family: Family
    log: Path

    def wait_for(self, condition: Callable[[], bool], seconds: float, every: float = 0.2) -> None:
        """Until `condition` holds; an assertion fails where it does not within `seconds`."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"not within {seconds} s"
            self.family.look()
            time.sleep(every)


def title_of(pid: int) -> str:
    """A process's name and command line, which Ray and vLLM set to what it is; empty where it has just ended."""
    try:
        process = psutil.Process(pid)
        return f"{process.name()} {' '.join(process.cmdline())}"
    except psutil.Error:
        return ""


def metrics_of(job: Job) -> list[dict[str, Any]]:
    """Of each step that has ended; the last line may still be on its way."""
    try:
        text = (job.folder / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line)["data"] for line in text[: text.rfind("\n") + 1].splitlines()]


@contextmanager
def running(job: Job) -> Iterator[RunningJob]:
    """The job, and nothing of it afterwards."""
    marker, scratch = uuid.uuid4().hex, tempfile.mkdtemp(prefix="rs-")  # short: Ray puts unix sockets in it
    log = job.folder / "job.log"
    with left_to_process_one():
        with log.open("wb") as out:
            process = subprocess.Popen(
                job.command, cwd=job.cwd, env={**os.environ, **job.environment, MARKER: marker, "RAY_TMPDIR": scratch},
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        family = Family(process.pid, marker)
        try:
            yield RunningJob(process, family, log)
        finally:
            family.stop()
            process.wait(10)
            shutil.rmtree(scratch, ignore_errors=True)
