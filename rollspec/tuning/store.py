"""Saves the tuning beside the history: the cost model, the strategy, the calibration.

One JSON file with a checksum and the machine and model it was measured on. On another machine the cost model is left
out; the calibration of drafts holds anywhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drafter_online.files import replace, set_aside
from rollspec.errors import HistoryError

FORMAT = "rollspec-tuning-1"
FILE = "tuning.json"
TIMED = ("tuner", "passes")  # what was measured in seconds, and means nothing on another machine


def save(folder: Path | str, tuning: Mapping[str, Any], machine: Mapping[str, Any]) -> Path:
    """Write `folder/tuning.json` atomically.

    Raises:
        HistoryError: the folder cannot be written; an earlier file is not changed.
    """
    folder = Path(folder)
    body = json.dumps({"machine": dict(machine), "tuning": tuning}, allow_nan=False, separators=(",", ":"))
    outer = {"format": FORMAT, "checksum": _checksum(body), "body": body}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace(folder / FILE, json.dumps(outer).encode(), private=True)
    except OSError as e:
        raise HistoryError(
            f"rollspec: the tuning cannot be written to {folder} ({e.strerror or e}); make it writable, free "
            "space, or set history.dir elsewhere."
        ) from e
    return folder / FILE


def load(folder: Path | str, machine: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str | None]:
    """What `folder/tuning.json` holds, and in one sentence what of it does not apply here; (None, None) without a file.

    Raises:
        HistoryError: the file is truncated, altered or of another format. It is renamed to `*.corrupt`.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        return None, None
    try:
        outer = json.loads(path.read_text(encoding="utf-8"))
        if outer.get("format") != FORMAT:
            raise ValueError(f"its format is {outer.get('format')!r}, not {FORMAT!r}")
        if outer["checksum"] != _checksum(outer["body"]):
            raise ValueError("its checksum does not match its contents")
        body = json.loads(outer["body"])
        tuning, then = dict(body["tuning"]), dict(body["machine"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise HistoryError(refuse(path, e)) from e
    differs = [k for k in sorted({*then, *machine}) if then.get(k) != machine.get(k)]
    if not differs:
        return tuning, None
    for name in TIMED:
        tuning.pop(name, None)
    k = differs[0]
    return tuning, (
        f"rollspec: the step costs in {path} were measured with {k} = {then.get(k)!r} and this is {machine.get(k)!r}; "
        "they are measured anew."
    )


def refuse(path: Path, error: BaseException) -> str:
    """Set a file aside that cannot be used, and say so in one sentence."""
    return f"rollspec: the file {path} is refused ({error}); {set_aside(path)} and step costs are measured anew."


def _checksum(body: str) -> str:
    return hashlib.blake2b(body.encode(), digest_size=16).hexdigest()
