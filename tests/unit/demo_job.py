"""A job of the demonstration that is a short script, in the place of verl."""

from __future__ import annotations

import sys
from pathlib import Path

from examples.demo.job import Job


def job(folder: Path, script: str, steps: int = 3) -> Job:
    return Job(
        name=folder.name,
        command=(sys.executable, "-c", script),
        environment={"OUT": str(folder), "MY_TOKEN": "secret"},
        removed=("RAY_ADDRESS",),
        folder=folder,
        cwd=folder.parent,
        total_steps=steps,
        settings={"seed": 3},
        settings_hash="abc",
    )


STEPS = """
import json, os, time
with open(os.environ["OUT"] + "/metrics.jsonl", "a", buffering=1) as f:
    for i in range({n}):
        f.write(json.dumps({{"step": i + 1, "data": {{"timing_s/gen": 0.5}}}}) + "\\n")
        print("step", i + 1, flush=True)
"""
