"""Copies of a daemon's state in the checkpoints of a job, and resuming from one.

    copies = Copies(dir)
    copies.out(checkpoint)           # state, buffer and versions, as they are on disk
    copies.back(checkpoint)          # in the place of what is in `dir`, which is set aside in `dir/replaced`

Files that are never written again are linked where the file system allows it, so that the replicas of a job, which ask
for a copy each, share one. Each of the three parts is there whole or not at all.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from drafter_online.errors import ServiceError
from drafter_online.files import temporary_folder
from drafter_online.versions import Versions

PARTS = ("state", "buffer", "versions")
REPLACED = "replaced"

SHARED_SECONDS = 60.0
"""For so long the replicas that save one checkpoint get the same copy."""


class Copies:
    """Of the daemon whose folder is `home`."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._made: list[Path] = []  # of one checkpoint, the first of which was copied from `home`
        self._at = 0.0

    def shares(self, folder: Path) -> bool:
        """Whether `out` would take the copy that a sibling (`.../replica_0/drafter`) got a moment ago."""
        if not self._made or folder in self._made or time.monotonic() - self._at > SHARED_SECONDS:
            return False
        return self._made[0].parent.parent == folder.parent.parent and self._made[0].is_dir()

    def out(self, folder: Path) -> None:
        """Copy what is on disk to `folder`, in the place of an older copy there.

        The folder must be there: one that only the job sees would be made on another machine, where the others do not
        find it.

        Raises:
            ServiceError: the folder is not there, cannot be written, or is a part of this daemon's own.
        """
        if not self.other(folder):
            return
        if not folder.is_dir():
            raise ServiceError(
                f"drafter-online: {folder} is not there for the daemon; put checkpoints on shared storage."
            )
        shared = self.shares(folder)
        source = self._made[0] if shared else self.home
        store = Versions(source / "versions")
        wanted = {store.promoted(), store.candidate(), store.latest()}

        def unwanted(at: str, names: list[str]) -> list[str]:
            hidden = [n for n in names if n.startswith(".")]  # unfinished
            if Path(at).name != "versions":
                return hidden
            return hidden + [n for n in names if n.isdigit() and int(n) not in wanted]

        try:
            for part in PARTS:
                _replace(source / part, folder / part, unwanted)
        except OSError as e:
            raise ServiceError(
                f"drafter-online: the drafter's state cannot be copied to {folder} ({_reason(e)}); make it writable "
                "for the daemon, or free space."
            ) from e
        if not shared:
            self._made, self._at = [], time.monotonic()
        self._made.append(folder)

    def back(self, folder: Path) -> None:
        """Put a copy in the place of what is here.

        Raises:
            ServiceError: it cannot be read, or this daemon's folder cannot be written.
        """
        aside = self.home / REPLACED
        moved: list[str] = []
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            for part in PARTS:
                if (self.home / part).is_dir():
                    os.rename(self.home / part, aside / part)
                    moved.append(part)
                _replace(folder / part, self.home / part)
        except OSError as e:
            for part in moved:
                with contextlib.suppress(OSError):
                    shutil.rmtree(self.home / part, ignore_errors=True)
                    os.rename(aside / part, self.home / part)
            raise ServiceError(
                f"drafter-online: the copy in {folder} cannot be taken over ({_reason(e)}); what was here is kept."
            ) from e

    def other(self, folder: Path) -> bool:
        """Whether a folder is another one than this daemon's own.

        Raises:
            ServiceError: it is within a part of it, or not absolute.
        """
        if not folder.is_absolute():
            raise ServiceError(f"drafter-online: {folder} is no absolute path; the daemon runs in another folder.")
        there, here = folder.resolve(), self.home.resolve()
        if any(there.is_relative_to(here / part) for part in (*PARTS, REPLACED)):
            raise ServiceError(f"drafter-online: {folder} is a part of the daemon's own folder {here}; give another.")
        return there != here


def _replace(source: Path, target: Path, ignore: Callable[[str, list[str]], list[str]] | None = None) -> None:
    """Copy a folder to the place of another, or remove that where there is none."""
    with temporary_folder(target.parent, f".{target.name}") as temporary:
        new, old = temporary / "new", temporary / "old"
        if source.is_dir():
            shutil.copytree(source, new, copy_function=_link, ignore=ignore)
        try:
            if target.is_dir():
                os.rename(target, old)
            if source.is_dir():
                os.rename(new, target)
        except OSError:
            if old.is_dir() and not target.exists():
                os.rename(old, target)
            raise


def _link(source: str, target: str) -> str:
    """Tensors are written once and replaced as files; anything else may be appended to."""
    if source.endswith(".safetensors"):
        try:
            os.link(source, target)
            return target
        except OSError:  # another file system, or one without links
            pass
    shutil.copy2(source, target)
    return target


def _reason(error: OSError) -> str:
    if isinstance(error, shutil.Error) and error.args and error.args[0]:
        return str(error.args[0][0][-1])
    return error.strerror or str(error)
