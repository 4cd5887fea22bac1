"""What a trainer sees of the engine on its device, in another process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from wire_ends import until

from drafter_online import activity
from drafter_online.activity import Activity, Watched

ENGINE = """
import sys, time
from pathlib import Path
from drafter_online.activity import Activity
engine = Activity()
assert engine.show(Path(sys.argv[1]))
print("there", flush=True)
for line in sys.stdin:
    getattr(engine, line.strip())()
    print("done", flush=True)
"""


@pytest.fixture(autouse=True)
def looks_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "LOOK_SECONDS", 0.0)


def test_an_engine_in_another_process(tmp_path: Path) -> None:
    file = tmp_path / "run" / "cuda-3"
    watched = Watched(file.parent)
    process = subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None

    def says(line: str) -> None:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{line}\n")
        process.stdin.flush()
        assert process.stdout.readline() == "done\n"

    try:
        assert watched.wanted() is not None, "no engine is there, so the device is not the trainer's either"
        assert process.stdout.readline() == "there\n"
        until(lambda: watched.wanted() is None)
        before = time.monotonic()
        says("begins")
        since = watched.wanted()
        assert since is not None and before < since < time.monotonic(), "since the step began"
        time.sleep(3 * activity.QUIET_SECONDS)
        assert watched.wanted() == since, "a long step"
        says("ends")
        assert watched.wanted() is not None, "the next step follows"
        until(lambda: watched.wanted() is None)
        assert watched.busy > 3 * activity.QUIET_SECONDS
        says("begins")
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert watched.wanted() is not None and watched.busy == 0.0
    finally:
        process.kill()
        process.wait()
    # Another engine takes its place, and the trainer sees it.
    after = Activity()
    assert after.show(file)
    until(lambda: watched.wanted() is None)


def test_one_engine_of_a_device_is_watched(tmp_path: Path) -> None:
    first, second, watched = Activity(), Activity(), Watched(tmp_path)
    second.begins()
    second.ends()
    assert first.show(tmp_path / "cpu-") and not second.show(tmp_path / "cpu-")
    first.away = True
    assert watched.wanted() is not None and first.away
    second.away = False
    assert watched.wanted() is not None
    first.away = False
    until(lambda: watched.wanted() is None)
    second.begins()
    assert watched.wanted() is None
    second.ends()
    assert second.busy > 0.0 == first.busy
    first.hide()
    assert watched.wanted() is not None and second.show(tmp_path / "cpu-"), "an engine that ended in a living process"
    until(lambda: watched.wanted() is None)
    first.begins()
    assert watched.wanted() is None and watched.busy == second.busy


def test_the_first_engine_that_shows_itself_says_which_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, other, watched = Activity(), Activity(), Watched(tmp_path / "devices")
    assert watched.wanted() is not None and watched.device == "" and watched.missing is None
    monkeypatch.setattr(activity, "MISSING_SECONDS", 0.0)
    assert watched.missing is not None and "no engine says in" in watched.missing
    assert first.show(tmp_path / "devices" / "GPU-2")
    until(lambda: watched.wanted() is None)
    assert other.show(tmp_path / "devices" / "GPU-1") and watched.device == "GPU-2"
    assert not watched.was_lent()
    first.away = True
    assert watched.wanted() is not None and watched.was_lent() and not watched.was_lent(), "once"
    first.hide()
    assert watched.wanted() is not None and watched.device == "GPU-2", "the other one's device is not the trainer's"
    assert "no engine on GPU-2 says" in str(watched.missing)
