"""The demonstration's runner: what a job writes, how it fails, and that nothing of it is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import shared_memory
from pathlib import Path

import pytest
from demo_job import STEPS, job

from examples.demo.processes import Family, process_table, remove_segments
from examples.demo.runner import JobFailed, MetricsTail, finished_run, log_tail, run_job
from rollspec.errors import RollspecError

linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


def alive(pid: int) -> bool:
    found = process_table().get(pid)
    return found is not None and found.state != "Z"


# ------------------------------------------------------------------------------------------------------- the runner


def test_finished_job(tmp_path: Path) -> None:
    seen: list[float] = []
    folder = tmp_path / "baseline"
    result = run_job(job(folder, STEPS.format(n=3)), on_step=lambda row: seen.append(row["training/global_step"]))
    assert seen == [1, 2, 3] and result.steps == 3
    data = json.loads((folder / "run.json").read_text())
    assert data["status"] == "finished" and data["exit_code"] == 0 and data["seed"] == 3
    assert "MY_TOKEN" not in data["environment"] and data["machine"]["cores"] == os.cpu_count()
    assert "step 3" in (folder / "job.log").read_text()
    assert finished_run(folder, "abc") and not finished_run(folder, "other")


def test_failing_job_names_its_cause(tmp_path: Path) -> None:
    script = STEPS.format(n=1) + "raise RuntimeError('no room for the KV cache')"
    with pytest.raises(JobFailed, match=r"exited with status 1 after 1 of 3 steps \(RuntimeError: no room") as caught:
        run_job(job(tmp_path / "r", script))
    assert "step 1" in caught.value.tail
    data = json.loads((tmp_path / "r" / "run.json").read_text())
    assert data["status"] == "failed" and "no room" in data["cause"]
    assert not finished_run(tmp_path / "r", "abc")


def test_early_end_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match="ended by itself after 2 of 3 steps"):
        run_job(job(tmp_path / "r", STEPS.format(n=2)))


def test_a_new_run_does_not_keep_old_numbers(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    for _ in range(2):
        assert run_job(job(folder, STEPS.format(n=3))).steps == 3
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 3


BROOD = """
import os, subprocess, sys, time
from multiprocessing import shared_memory, resource_tracker
sleeper = [sys.executable, "-c", "import time; time.sleep(120)"]
child = subprocess.Popen(sleeper, start_new_session=True)
# A stray: its parent exits, so it descends from the job no more.
apart = "start_new_session=True, stdout=-3, stderr=-3"
parent = f"import subprocess; p = subprocess.Popen({sleeper!r}, {apart}); print(p.pid)"
stray = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True).stdout.strip()
segment = shared_memory.SharedMemory(create=True, size=64)
resource_tracker.unregister(segment._name, "shared_memory")
open(os.environ["OUT"] + "/brood", "w").write(f"{child.pid} {stray} {segment.name}")
time.sleep(120)
"""


def brood(folder: Path) -> tuple[list[int], str]:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if (folder / "brood").exists() and len(words := (folder / "brood").read_text().split()) == 3:
            return [int(words[0]), int(words[1])], words[2]
        time.sleep(0.05)
    raise AssertionError("the job did not start")


@linux
def test_timeout_stops_everything_and_frees_shared_memory(tmp_path: Path) -> None:
    mine = shared_memory.SharedMemory(create=True, size=64)  # live, someone else's: must stay
    try:
        with pytest.raises(JobFailed, match="time limit, with 0 steps done"):
            run_job(job(tmp_path / "r", BROOD), timeout=6.0)
        pids, segment = brood(tmp_path / "r")
        assert not any(map(alive, pids))
        assert not Path("/dev/shm", segment).exists()
        assert Path("/dev/shm", mine.name).exists()
    finally:
        mine.close()
        mine.unlink()


def test_stall_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match=r"no training step ended for 5 s \(1 steps done\)"):
        run_job(job(tmp_path / "r", STEPS.format(n=1) + "time.sleep(60)"), stall=5.0)


@linux
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_stops_everything(tmp_path: Path, number: signal.Signals) -> None:
    folder = tmp_path / "r"
    timer = threading.Thread(target=lambda: (brood(folder), os.kill(os.getpid(), number)))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        run_job(job(folder, BROOD), timeout=30)
    timer.join()
    pids, segment = brood(folder)
    assert not any(map(alive, pids)) and not Path("/dev/shm", segment).exists()
    assert json.loads((folder / "run.json").read_text())["status"] == "interrupted"


@linux
def test_family_spares_a_reused_pid() -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    try:
        family = Family(root=2**22 + 1, marker="no-process", members={other.pid: 1})  # same pid, another start time
        assert family.stop(grace=0.2) == []
        assert alive(other.pid)
    finally:
        other.kill()
        other.wait()


@linux
def test_only_unmapped_python_segments_are_removed(tmp_path: Path) -> None:
    segment = shared_memory.SharedMemory(create=True, size=64)
    try:
        assert remove_segments([segment.name, "psm_not_there", "other_name"]) == []
        assert Path("/dev/shm", segment.name).exists()
    finally:
        segment.close()
        segment.unlink()


def test_unwritable_folder_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RollspecError, match="cannot be written"):
        run_job(job(tmp_path / "file" / "r", ""))


def test_tail_waits_for_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    tail = MetricsTail(path)
    assert tail.read() == []
    path.write_text('{"a": 1}\n{"a":')
    assert tail.read() == [{"a": 1.0}]
    with path.open("a") as f:
        f.write(' 2}\nrubbish\n{"a": 3}\n')
    assert tail.read() == [{"a": 2.0}, {"a": 3.0}]


def test_log_tail_is_plain_and_short(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("\n".join(f"\x1b[31mline {i}\x1b[0m" for i in range(100)) + "\n" + "x" * 900)
    lines = log_tail(path, lines=3).split("\n")
    assert lines[0] == "line 98" and len(lines[-1]) == 240
    assert log_tail(tmp_path / "none") == ""
