"""One daemon per folder: a lock that goes with the process, however it ends."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from drafter_online.errors import ServiceError


def lock_folder(folder: Path) -> int:
    """Take a folder for this process; closing the returned file descriptor frees it.

    Raises:
        ServiceError: it cannot be written, or another daemon has it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as e:
        raise ServiceError(
            f"drafter-online: {folder} cannot be written ({e.strerror or e}); give another --dir."
        ) from e
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        owner = os.read(fd, 64).decode(errors="replace").strip()
        os.close(fd)
        raise ServiceError(
            f"drafter-online: {folder} is in use by another daemon (process {owner or 'unknown'}); stop it, or give "
            "another --dir."
        ) from e
    os.ftruncate(fd, 0)
    os.write(fd, json.dumps(os.getpid()).encode())
    return fd
