"""An engine in a process of its own: it ends with the one that started it, and its log says why it failed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path


def end_with(parent: int, folder: Path | None = None) -> None:
    """End this process and its engine once `parent` is gone, and remove `folder`: killed, it cannot do so itself.

    Does nothing in a process that leads no group of its own: the group is ended.
    """
    if os.getpgrp() != os.getpid():
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="rollspec-parent", daemon=True).start()


def first_error(log: str) -> str | None:
    """The first error in a log of several processes, which is the one that ended the others; None where none is."""
    found = re.search(r"(?:^|\] +)([A-Za-z_.]*(?:Error|Exception): .+)$", log, re.MULTILINE)
    return found[1].strip() if found else None
