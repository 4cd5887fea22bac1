"""Removes shared memory that an engine would leave behind.

vLLM's processes talk through segments that their creator removes when it ends in order. Under verl it never does: Ray
kills the servers and all below them, and with them Python's resource tracker, so each job leaves some hundred MB of
names in /dev/shm. A segment's name is needed only until everyone is attached; the memory lives as long as a process
maps it. So the names an engine had when it was up may be removed as soon as no process will attach any more: when it
died, and when the training loop has ended.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
SHM = Path("/dev/shm")
_NAME = re.compile(r"/dev/shm/(psm_\w+)")


def mapped_below() -> set[str]:
    """Names of the segments that descendants of this process map; none where there is no /proc."""
    import psutil  # vLLM depends on it

    names: set[str] = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(OSError, UnicodeDecodeError):
            names.update(_NAME.findall((PROC / str(process.pid) / "maps").read_text()))
    return names


def remove(names: Iterable[str]) -> list[str]:
    """Remove the names; those that were still there."""
    removed = []
    for name in sorted(names):
        with suppress(OSError):
            (SHM / name).unlink()
            removed.append(name)
    return removed
