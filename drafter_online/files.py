"""Files that are there whole or not at all, on disk before any reader learns of them."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def write_synced(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file and wait until it is on disk; `mode`: of a new one, less the umask."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on disk; or what is in a file."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_tree(path: Path) -> None:
    """Wait until all files of a folder are on disk, and their names."""
    for folder, _, files in os.walk(path):
        for name in (*files, ""):
            sync_folder(Path(folder, name))


def replace(path: Path, data: bytes, private: bool = False) -> None:
    """Put `data` in the place of `path`: a reader sees the old file or the new one. `private`: only this user does."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}-{uuid.uuid4().hex[:8]}")
    try:
        write_synced(temporary, data, 0o600 if private else 0o666)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def temporary_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder in `parent`, where files are put together. Renamed to its place, or else deleted at the end."""
    folder = parent / f"{prefix}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir(parents=True)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def set_aside(path: Path) -> str:
    """Rename a damaged file to `*.corrupt`, so that the next save does not destroy it; what there is to say of that."""
    aside = path.with_name(f"{path.name}.corrupt")
    try:
        os.replace(path, aside)
    except OSError:
        return "delete it"
    return f"it was moved to {aside}"


@contextlib.contextmanager
def oserror_as(error: type[Exception], what: str, remedy: str = "") -> Iterator[None]:
    """Raise an OSError of the block as `error`: what cannot be done, the reason in brackets, and the remedy."""
    try:
        yield
    except OSError as e:
        reason = e.strerror or str(e)
        if isinstance(e, shutil.Error) and e.args and e.args[0]:
            reason = str(e.args[0][0][-1])  # of the first file of a tree
        raise error(f"{what} ({reason}){remedy and f'; {remedy}'}.") from e


def try_lock(path: Path) -> int | None:
    """Take the lock on a file, made if it is not there; None: another process has it. It goes with the process.

    Returns:
        the file's descriptor; closing it gives the lock back.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        os.close(fd)
        if isinstance(e, BlockingIOError):
            return None
        raise
    return fd


def sha256(data: bytes) -> str:
    """Checksum of a file's contents, in hex."""
    return hashlib.sha256(data).hexdigest()


def digest(record: Mapping[str, Any]) -> str:
    """Checksum of a JSON object, whatever the order of its keys."""
    return sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode())
