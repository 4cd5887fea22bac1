"""An engine in a process of its own: it ends with the one that started it, and its log says why it failed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Set where the user has not: without them vLLM on CPU reserves half the memory and may pin threads to one core."""


def run(module: str, job: Path, log: Path, seconds: float, written: Callable[[], bool]) -> int | None:
    """Run `python -m module JOB PID`, PID being this process's, and end all that it started.

    Args:
        written: called a few times a second; whether all is written, though the engine takes many seconds more to end.

    Returns:
        its exit status, 0 where all is written; None where it took longer than `seconds`.
    """
    # rollspec's own switches are of jobs; this engine is what its job says.
    kept = {k: v for k, v in os.environ.items() if k != "ROLLSPEC" and not k.startswith("ROLLSPEC__")}
    quiet = {"VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
    # A file and not a pipe: an engine process that outlives its parent would hold a pipe open.
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(job), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**CPU_ENVIRONMENT, **quiet, **kept},
            start_new_session=True,
        )
        end, code = time.monotonic() + seconds, None
        try:
            while code is None and time.monotonic() < end:
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(0.2)
                if written():
                    code = 0
        finally:
            # Also after a normal end: what outlives this engine would share the machine with what follows.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return code


def end_with(parent: int, folder: Path | None = None) -> None:
    """End this process and its engine once `parent` is gone, and remove `folder`: killed, it cannot do so itself.

    Does nothing in a process that leads no group of its own: the group is ended.
    """
    if os.getpgrp() != os.getpid():
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="rollspec-parent", daemon=True).start()


def first_error(log: str) -> str | None:
    """The first error in a log of several processes, which is the one that ended the others; None where none is."""
    found = re.search(r"(?:^|\] +)([A-Za-z_.]*(?:Error|Exception): .+)$", log, re.MULTILINE)
    return found[1].strip() if found else None
