"""Which replica has a version on canary: files in the version's folder, read and created by all that share the store.

    store/00000007/canary-0.json      who claimed it: {"replica", "life", "beat", "released"}
    store/00000007/verdict-0.json    what came of that: {"replica", "verdict", "reason", "facts"}

Creating a file that exists fails, so of several replicas exactly one gets the next claim. It rewrites the file as long
as it lives (`beat`).
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafter_online.lifecycle import Verdict

ABANDONED_SECONDS = 3600.0
"""A claim whose beat is older, by the clocks of the store and of who looks, no longer keeps its version in the store.
Replicas judge by their own clock alone, and much sooner (`shared_canary.LEASE_SECONDS`)."""


@dataclass(frozen=True)
class Claim:
    """A version's claim. `attempt` counts from 0; `token` changes with every beat."""

    attempt: int
    replica: str
    life: str
    token: str
    released: bool


def path(folder: Path, attempt: int) -> Path:
    """Where a claim on the version in `folder` is."""
    return folder / f"canary-{attempt}.json"


def verdict_path(folder: Path, attempt: int) -> Path:
    """Where its verdict is."""
    return folder / f"verdict-{attempt}.json"


def attempts(folder: Path) -> list[int]:
    """Claims on a version so far, in order."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(n[7:-5]) for n in names if n.startswith("canary-") and n.endswith(".json") and n[7:-5].isdigit())


def read(folder: Path, attempt: int) -> Claim:
    """A claim. One that is being written, or is damaged, belongs to an unknown replica."""
    row = _read(path(folder, attempt)) or {}
    return Claim(
        attempt,
        str(row.get("replica", "?")),
        str(row.get("life", "")),
        json.dumps(row, sort_keys=True),
        row.get("released") is True,
    )


def latest(folder: Path) -> Claim | None:
    """The newest claim on a version."""
    found = attempts(folder)
    return read(folder, found[-1]) if found else None


def verdict(folder: Path, attempt: int) -> Verdict | None:
    """What came of a claim; None: nothing yet."""
    row = _read(verdict_path(folder, attempt))
    found = None if row is None else row.get("verdict")
    return found if found in ("promoted", "rolled_back", "refused") else None


def on_canary(folder: Path) -> bool:
    """Whether a replica has a version on canary: its claim is not released, has no verdict, and is not abandoned."""
    claim = latest(folder)
    if claim is None or claim.released or verdict(folder, claim.attempt) is not None:
        return False
    try:
        return time.time() - path(folder, claim.attempt).stat().st_mtime < ABANDONED_SECONDS
    except OSError:
        return False


def _read(file: Path) -> dict[str, Any] | None:
    try:
        row = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    return row if isinstance(row, dict) else None
