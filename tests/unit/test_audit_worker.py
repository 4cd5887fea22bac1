"""The audit's worker outlives no audit, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]], start_new_session=True)
time.sleep(60)
"""
WORKER = """
import os, sys, time
from pathlib import Path
from rollspec.audit.worker import _end_with
_end_with(os.getppid(), Path(sys.argv[1]))
(Path(sys.argv[1]) / "pid").write_text(str(os.getpid()))
time.sleep(60)
"""


def test_a_killed_audit_takes_its_engine_and_its_folder_along(tmp_path: Path) -> None:
    folder = tmp_path / "rollspec-audit-x"
    folder.mkdir()
    audit = subprocess.Popen([sys.executable, "-c", PARENT, WORKER, str(folder)])
    try:
        pid = int(_wait_for(lambda: (folder / "pid").is_file() and (folder / "pid").read_text()) or 0)
    finally:
        audit.send_signal(signal.SIGKILL)
        audit.wait()
    assert pid and _wait_for(lambda: not folder.exists()), "its folder is left"
    assert _wait_for(lambda: not _lives(pid)), "its engine goes on"


def _wait_for(found: Callable[[], Any], seconds: float = 40.0) -> Any:
    end = time.monotonic() + seconds
    while not (value := found()) and time.monotonic() < end:
        time.sleep(0.1)
    return value


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
