"""The machine: what it is, which cores are whose, and where and when a result was made."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import threading
import time
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ORPHAN_SECONDS = 2.0  # between two looks whether the process that started this one is there

TRAINER_CORES = "ROLLSPEC_TRAINER_CORES"
"""Environment: the cores that the trainer's process runs on, as `2,5-7`; unset: those of the engine that starts it."""


def machine() -> dict[str, Any]:
    """System, processor, cores and memory."""
    model = platform.processor() or platform.machine()
    with suppress(OSError):
        if found := re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text()):
            model = found.group(1).strip()
    memory = None
    with suppress(OSError, ValueError, AttributeError):
        memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    return {"system": f"{platform.system()} {platform.machine()}", "cpu": model, "cores": os.cpu_count(),
            "memory_gib": memory}  # fmt: skip


BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16", "svebf16")
"""Flags of CPUs with bfloat16 arithmetic. Others emulate it: a matrix product then takes thirty times as long."""


def native_dtype(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Name of the number format that this CPU computes in: `bfloat16` where it can, else `float32`."""
    try:
        text = cpuinfo.read_text(encoding="utf-8")
    except OSError:
        return "float32"
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return "bfloat16" if found and set(found.group(1).split()) & set(BFLOAT16) else "float32"


def git_sha() -> str | None:
    """Of the checkout that this package lies in; None where it is installed elsewhere, if inside another's checkout."""

    def git(*args: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "rollspec/machine.py")
        return git("rev-parse", "HEAD") + (" with local changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def local_folder(name: str | Path) -> Path:
    """The folder of a checkpoint that was loaded before: `name` itself, or where the hub's cache has it."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(str(name), local_files_only=True))


def now() -> str:
    """UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def when_orphaned(parent: int, then: threading.Event) -> None:
    """Set the event when the process that started this one is gone: a raylet, in the process of an actor."""
    while os.getppid() == parent:
        time.sleep(ORPHAN_SECONDS)
    then.set()
