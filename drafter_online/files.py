"""Files that are there whole or not at all, on disk before anybody is told of them."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on disk."""
    with open(path, "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace(path: Path, data: bytes) -> None:
    """Put `data` in the place of `path`: a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}-{uuid.uuid4().hex[:8]}")
    try:
        write_synced(temporary, data)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def try_lock(path: Path) -> int | None:
    """Take the lock on a file, made if it is not there; None: another process has it. It goes with the process.

    Returns:
        the file's descriptor; closing it gives the lock back.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:
        os.close(fd)
        raise
    return fd


def sha256(data: bytes) -> str:
    """Checksum of a file's contents, in hex."""
    return hashlib.sha256(data).hexdigest()


def digest(record: Mapping[str, Any]) -> str:
    """Checksum of a JSON object, whatever the order of its keys."""
    return sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode())
