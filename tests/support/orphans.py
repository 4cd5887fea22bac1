"""Who becomes the parent of a process whose own parent has died (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

PR_SET_CHILD_SUBREAPER = 36


def adopt(here: bool = True) -> None:
    """This process, which can find them then; or, as for every program that does not ask for it, process 1."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(here), 0, 0, 0)


@contextlib.contextmanager
def left_to_process_one() -> Iterator[None]:
    """While a job runs whose driver is killed: Ray's workers end when process 1 is their parent, and no other."""
    adopt(False)
    try:
        yield
    finally:
        adopt()
