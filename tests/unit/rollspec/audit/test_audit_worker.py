"""The audit's worker keeps as many tokens as were asked for, outlives no audit, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollspec.audit.engine import AuditPlan
from rollspec.audit.worker import AuditResponse, cut, sample

PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]], start_new_session=True)
time.sleep(60)
"""
WORKER = """
import os, sys, time
from pathlib import Path
from drafter_online.child import end_with
end_with(os.getppid(), Path(sys.argv[1]))
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


def _rounds(lengths: Any, tokens: int) -> tuple[list[AuditResponse], list[tuple[int, int]], list[int]]:
    """The responses of an engine whose lengths are `lengths(request)`, what it was asked for, and the progress."""
    asked: list[tuple[int, int]] = []
    noted: list[int] = []

    def one(r: int, siblings: int) -> list[AuditResponse]:
        asked.append((r, siblings))
        sizes = [lengths(i) for i in range(8 * siblings)]
        return [AuditResponse(i // siblings, r, [r] * n, [-1.0] * n) for i, n in enumerate(sizes)]

    plan = AuditPlan(((1,),) * 8, tokens=tokens)
    return sample(plan, one, noted.append), asked, noted


@pytest.mark.parametrize("tokens", [5_000, 40_000, 999])
@pytest.mark.parametrize("lengths", [lambda i: 64, lambda i: 1 + i % 64, lambda i: 3], ids=["full", "mixed", "short"])
def test_as_many_tokens_are_tested_as_were_asked_for(tokens: int, lengths: Any) -> None:
    found, asked, noted = _rounds(lengths, tokens)
    assert sum(len(s.tokens) for s in found) == sum(len(s.log_probs) for s in found) == tokens
    assert len(asked) >= 2 and {s.round for s in found} == set(range(len(asked))), "each round is in it"
    assert all(2 <= siblings <= 16 for _, siblings in asked)
    assert noted == sorted(noted) and noted[-1] == tokens and noted[-2] < tokens, "not finished while it still samples"


def test_no_more_is_generated_than_a_round_of_siblings_too_many() -> None:
    """5,000 tokens were 13,372: two rounds of 16 siblings each, whatever was asked for."""
    _, asked, _ = _rounds(lambda i: 64, 5_000)
    assert sum(8 * siblings * 64 for _, siblings in asked) < 5_000 + 2 * 8 * 64


def test_what_is_cut_depends_on_no_token() -> None:
    rows = [AuditResponse(i, 0, [i] * 4, [0.0] * 4) for i in range(5)]
    found = cut(rows, 10)
    assert [(s.prompt, len(s.tokens)) for s in found] == [(0, 4), (1, 4), (2, 2)]
    assert cut(rows, 0) == [] and [len(s.tokens) for s in cut(rows, 99)] == [4] * 5
