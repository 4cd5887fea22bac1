"""Reads what W&B wrote on this machine, offline or not: `wandb/offline-run-*/run-*.wandb`.

The file is a log of protobuf records in LevelDB's log format (blocks of 32 KiB; each piece has a header of checksum,
length and type), as the `wandb` client writes it; its own message types decode the records.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollspec.errors import RollspecError

BLOCK = 32768
HEADER = struct.Struct("<IHB")
MAGIC = b":W&B"
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def find(folder: Path) -> list[Path]:
    """The `.wandb` files of `folder`: of a run's own folder, of one that holds runs, or of `folder/wandb`."""
    for pattern in ("*.wandb", "*run-*/*.wandb", "wandb/*run-*/*.wandb"):
        # `latest-run` links to a run that is in the list already.
        found = sorted({p.resolve() for p in folder.glob(pattern)})
        if found:
            return found
    return []


def read(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any], list[str]]:
    """(history rows, provenance, notes) of one `.wandb` file. A row's nested keys are joined by dots.

    Raises:
        RollspecError: the file is not one of W&B's, or `wandb` is not installed.
    """
    try:
        from wandb.proto.wandb_internal_pb2 import Record
    except ImportError as e:
        raise RollspecError(
            f"rollspec: {path} can be read with the wandb package only, and it is not installed; run pip install wandb."
        ) from e
    raw = path.read_bytes()
    if not raw.startswith(MAGIC):
        raise RollspecError(f"rollspec: {path} is not a file of W&B's; give a run folder with run-<id>.wandb.")
    notes: list[str] = []
    rows: list[dict[str, Any]] = []
    provenance: dict[str, Any] = {"name": path.stem.removeprefix("run-")}
    for data in _records(raw, notes):
        record = Record.FromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            rows.append({_name(item): json.loads(item.value_json) for item in record.history.item})
        elif kind == "run":
            run = record.run
            provenance |= {"name": run.display_name or run.run_id, "project": run.project, "host": run.host}
            provenance["started"] = run.start_time.ToJsonString()
    return rows, provenance, notes


def _name(item: Any) -> str:
    return item.key or ".".join(item.nested_key)


def _records(raw: bytes, notes: list[str]) -> Iterator[bytes]:
    at, whole = 7, b""  # the file's own header is in the first block
    while at + HEADER.size <= len(raw):
        left = BLOCK - at % BLOCK
        if left < HEADER.size:  # filled up with zeros
            at += left
            continue
        _, size, kind = HEADER.unpack_from(raw, at)
        at += HEADER.size
        if kind not in (FULL, FIRST, MIDDLE, LAST) or at + size > len(raw):
            notes.append("The W&B file ends in the middle of a record: the run was killed, or is still running.")
            return
        whole = raw[at : at + size] if kind in (FULL, FIRST) else whole + raw[at : at + size]
        at += size
        if kind in (FULL, LAST):
            yield whole
