"""Whether an engine uses its device, for a trainer in another process that shares it: a few bytes that both map.

    device = Activity()                      # the engine's; not shown to a trainer yet
    device.show(folder / name_of_device)     # False: another engine of this device is the one that is watched
    device.begins(), device.ends()           # around a step
    device.away = True                       # the engine sleeps, or the policy's trainer has the device

    watched = Watched(folder)                # the trainer's: the device of the first engine that shows itself
    watched.wanted()                         # since when the device is not the trainer's; None: it may train

Times are `time.monotonic()`, which all processes of a machine share.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import time
from pathlib import Path

from drafter_online.files import try_lock

QUIET_SECONDS = 0.05
"""Without a step for this long, the engine has no request running."""

LOOK_SECONDS = 0.5
"""Between two looks whether the engine is still there."""

MISSING_SECONDS = 60.0
"""Without an engine for this long, while samples of engines wait, the trainer says so."""

AUTOGROUP = Path("/proc/self/autogroup")
"""Linux shares the CPU between sessions first, and between a session's processes, by niceness, then."""

INSIDE, STEPPED, AWAY, BUSY = range(4)
"""Numbers: a step runs (1 or 0); when the last one began or ended; the device is lent (1 or 0); seconds of steps."""

SIZE = 8 * 4


def give_way(nice: int) -> None:
    """Let others come first on the CPU: of this thread, of those that it will start, and of the session that is this
    process's alone.
    """
    os.nice(nice)
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):  # a kernel that does not share by session
            AUTOGROUP.write_text(str(nice))


class Activity:
    """Of one engine."""

    def __init__(self) -> None:
        self._values = memoryview(bytearray(SIZE)).cast("d")
        self._lock: int | None = None
        self._values[STEPPED] = time.monotonic()

    def show(self, path: Path) -> bool:
        """Write to `path` from now on, where no other engine does; the lock on it goes with this process.

        Raises:
            OSError: it cannot be written.
        """
        if self._lock is None and (lock := try_lock(path)) is not None:
            os.pwrite(lock, bytes(self._values), 0)  # takes the room; a map of a full file system's file would end us
            self._lock, self._values = lock, memoryview(mmap.mmap(lock, SIZE)).cast("d")
        return self._lock is not None

    def hide(self) -> None:
        """Write to no file any more: another engine of the device may."""
        if self._lock is not None:
            self._values = memoryview(bytearray(bytes(self._values))).cast("d")
            os.close(self._lock)
            self._lock = None

    def begins(self) -> None:
        """A step begins."""
        self._values[STEPPED] = time.monotonic()
        self._values[INSIDE] = 1.0

    def ends(self) -> None:
        """It ends."""
        v, now = self._values, time.monotonic()
        if v[INSIDE]:
            v[BUSY] += now - v[STEPPED]
        v[STEPPED] = now
        v[INSIDE] = 0.0

    @property
    def away(self) -> bool:
        """Whether the engine sleeps, or its device is lent to something else."""
        return bool(self._values[AWAY])

    @away.setter
    def away(self, value: bool) -> None:
        self._values[AWAY] = float(value)

    @property
    def busy(self) -> float:
        """Seconds that steps have taken."""
        return float(self._values[BUSY])


class Watched:
    """An engine's activity, as the trainer sees it: of the first one that shows itself in `folder`, and then of those
    on the same device. Without an engine there the device is not the trainer's either.

    Attributes:
        device: name of the file, and so of the device; empty before there was an engine.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.device = ""
        self._values: memoryview[float] | None = None
        self._looked = -LOOK_SECONDS
        self._seen = time.monotonic()  # an engine
        self._lent = False

    def wanted(self) -> float | None:
        """Since when the device is the engine's or somebody else's; None where training may use it."""
        now = time.monotonic()
        if now - self._looked >= LOOK_SECONDS:
            self._looked = now
            self._look()
        v = self._values
        if v is None or v[AWAY]:
            return now
        stepped = v[STEPPED]
        return stepped if v[INSIDE] or now - stepped <= QUIET_SECONDS else None

    @property
    def busy(self) -> float:
        """Seconds that the engine's steps have taken."""
        return 0.0 if self._values is None else float(self._values[BUSY])

    def was_lent(self) -> bool:
        """Whether the engine's device was lent to something else since this was last asked."""
        before, v = self._lent, self._values
        self._lent = bool(v is not None and v[AWAY])
        return self._lent and not before

    @property
    def missing(self) -> str | None:
        """One sentence without its full stop where no engine has been there for long, else None."""
        if time.monotonic() - self._seen < MISSING_SECONDS:
            return None
        where = f"on {self.device} " if self.device else ""
        return f"the drafter is not trained, because no engine {where}says in {self.folder} when it computes"

    def _look(self) -> None:
        """Whether an engine writes to a file, which then has its lock."""
        found = None
        with contextlib.suppress(OSError):
            for name in [self.device] if self.device else sorted(os.listdir(self.folder)):
                found = self._map(self.folder / name)
                if found is not None:
                    self.device, self._seen = name, time.monotonic()
                    break
        self._values = found

    def _map(self, path: Path) -> memoryview[float] | None:
        fd = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
        except BlockingIOError:
            if self._values is not None or os.fstat(fd).st_size < SIZE:
                return self._values
            return memoryview(mmap.mmap(fd, SIZE, access=mmap.ACCESS_READ)).cast("d")
        finally:
            os.close(fd)
