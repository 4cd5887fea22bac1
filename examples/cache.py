"""Results that are built once: in a folder named by a hash of their inputs, never found half-written."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def home() -> Path:
    """The user's cache of what examples and benchmarks build: `rollspec` in XDG_CACHE_HOME, else in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rollspec"


def built_once(cache: str | Path, name: str, last: str, build: Callable[[Path], None]) -> Path:
    """The folder `name` in `cache`, built there unless it is.

    It is written beside its final place and renamed, so several processes may call this at once.

    Args:
        cache: made when missing.
        name: of the folder; holds a hash of everything that the result depends on.
        last: a file that `build` writes; where it is, the result is whole.
        build: writes the result into the folder that it is given.
    """
    cache = Path(cache).expanduser().resolve()
    cache.mkdir(parents=True, exist_ok=True)
    final = cache / name
    if (final / last).is_file():
        return final
    work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache))
    try:
        build(work)
        work.chmod(0o755)  # mkdtemp makes it private; other users' workers read it
        try:
            os.rename(work, final)
        except OSError:
            if not (final / last).is_file():  # otherwise another process was faster: take its result
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return final
