"""Stops a job and everything it started, and removes the shared memory it left behind.

Ray starts its workers in sessions of their own, so killing the job's process group is not enough; and a worker whose
parent died no longer descends from the job. So a `Family` knows its members in three ways: it follows descendants while
the job runs, it knows the job's process group, and it finds a marker variable in the environment of strays.
Linux's /proc is read where there is one; elsewhere the process group alone is stopped.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

MARKER = "ROLLSPEC_DEMO_JOB"
SHM = Path("/dev/shm")
SEGMENTS_SECONDS = 10.0  # between looks at what members map: it reads some MB of /proc
PREFIXES = ("psm_", "sem.mp-")
PROC = Path("/proc")


@dataclass(frozen=True)
class Process:
    """One process. `started` (clock ticks since boot) tells it from a later one that got the same pid."""

    pid: int
    parent: int
    group: int
    state: str
    started: int


@dataclass
class Family:
    """A job and all it started. `root` is the pid of the job, which leads its own process group."""

    root: int
    marker: str
    members: dict[int, int] = field(default_factory=dict)  # pid -> started
    segments: set[str] = field(default_factory=set)  # shared memory that members were seen to map
    next_segments: float = 0.0

    def look(self) -> None:
        """Take note of who belongs to the job now; call this every second or so while it runs."""
        table = process_table()
        children: dict[int, list[Process]] = {}
        for p in table.values():
            children.setdefault(p.parent, []).append(p)
        known = [pid for pid, started in self.members.items() if pid in table and table[pid].started == started]
        queue = [p.pid for p in table.values() if p.pid == self.root or p.group == self.root] + known
        seen: set[int] = set()
        while queue:
            pid = queue.pop()
            if pid in seen or pid not in table:
                continue
            seen.add(pid)
            self.members[pid] = table[pid].started
            queue += [child.pid for child in children.get(pid, ())]
        if time.monotonic() >= self.next_segments:
            self.segments |= {name for pid in seen for name in mapped(pid)}
            self.next_segments = time.monotonic() + SEGMENTS_SECONDS

    def alive(self, strays: bool = False) -> list[int]:
        """Pids of the job that still run; with `strays`, found by the marker variable as well."""
        self.look()
        table = process_table()
        if strays:
            wanted = f"{MARKER}={self.marker}".encode()
            for pid, p in table.items():
                with suppress(OSError):  # gone meanwhile, or another user's
                    if wanted in (PROC / str(pid) / "environ").read_bytes().split(b"\0"):
                        self.members.setdefault(pid, p.started)
        me = os.getpid()
        return sorted(
            pid
            for pid, started in self.members.items()
            if pid != me and pid in table and table[pid].started == started and table[pid].state != "Z"
        )

    def signal(self, number: int) -> None:
        """Send a signal to everything that still runs: SIGSTOP halts it, SIGCONT lets it go on."""
        for pid in self.alive():
            with suppress(OSError):
                os.kill(pid, number)

    def stop(self, grace: float = 10.0) -> list[int]:
        """Ask with SIGTERM, insist with SIGKILL after `grace` seconds; the pids that needed stopping.

        Never touches the calling process or a process that got the pid of a dead member.
        """
        stopped: set[int] = set()
        self.alive(strays=True)
        self.signal(signal.SIGCONT)  # what is halted does not hear that it is to end
        self.next_segments = 0.0  # the last chance to see what they map
        self.look()
        for sig, wait in ((signal.SIGTERM, grace), (signal.SIGKILL, 5.0)):
            end = time.monotonic() + wait
            left = self.alive(strays=True)
            with suppress(OSError):
                os.killpg(self.root, sig)  # covers systems without /proc
            for pid in left:
                stopped.add(pid)
                with suppress(OSError):
                    os.kill(pid, sig)
            while left and time.monotonic() < end:
                time.sleep(0.1)
                left = self.alive()
            if not left and not self.alive(strays=True):
                break
        return sorted(stopped)


def process_table() -> dict[int, Process]:
    """All processes by pid; empty where there is no /proc."""
    out: dict[int, Process] = {}
    if not PROC.is_dir():
        return out
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "stat").read_text()
        except (OSError, UnicodeDecodeError):
            continue  # it ended while the table was read
        # "pid (name) state ppid pgrp ...": the name may hold spaces and brackets, so count from the last bracket.
        fields = text[text.rindex(")") + 2 :].split()
        pid = int(entry.name)
        out[pid] = Process(pid, int(fields[1]), int(fields[2]), fields[0], int(fields[19]))
    return out


def mapped(pid: int) -> set[str]:
    """Names of the segments and semaphores of Python's multiprocessing that a process maps."""
    with suppress(OSError, UnicodeDecodeError):
        found: list[str] = re.findall(r"/dev/shm/(\S+)", (PROC / str(pid) / "maps").read_text())
        return {name for name in found if name.startswith(PREFIXES)}
    return set()


def remove_segments(names: Iterable[str]) -> list[str]:
    """Remove those of `names` that are ours and that no live process has mapped or open; the ones removed.

    Names come from `Family.segments`: another job here may be about to attach to a segment that looks unused.
    """
    removed = []
    used = _segments_in_use()
    for name in sorted(set(names) - used):
        path = SHM / name
        with suppress(OSError):
            if name.startswith(PREFIXES) and path.stat().st_uid == os.getuid():
                path.unlink()
                removed.append(name)
    return removed


def _segments_in_use() -> set[str]:
    used: set[str] = set()
    if not PROC.is_dir():
        return used
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError, UnicodeDecodeError):
            used |= set(re.findall(r"/dev/shm/(\S+)", (entry / "maps").read_text()))
        with suppress(OSError):
            for fd in (entry / "fd").iterdir():
                with suppress(OSError):
                    target = os.readlink(fd)
                    if target.startswith("/dev/shm/"):
                        used.add(target.rsplit("/", 1)[1].split(" ")[0])
    return used
