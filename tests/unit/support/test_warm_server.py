"""Programs that the tests fork from a server are what they would be as processes of their own, and end like them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from warm_server import started

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

PROGRAM = """
import os, sys, types
print(__name__, sys.argv[1:], os.getcwd(), os.environ["GIVEN"], sys.stdin.read(), os.getppid(), "loaded" in vars(types))
print("to stderr", file=sys.stderr)
sys.exit(3)
"""


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("modules")
    (folder / "loaded_once.py").write_text("import types\ntypes.loaded = True\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        with started(["loaded_once"]) as found:
            yield found


def test_a_script_is_as_it_would_be(variables: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    said = {}
    for name, env in (("forked", variables), ("alone", {})):
        done = subprocess.run(
            [sys.executable, "-u", path, "-x", "y"], input="read", capture_output=True, text=True, cwd=tmp_path,
            env={**os.environ, **env, "GIVEN": "value"}, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (3, "to stderr\n")
        said[name] = done.stdout.split()
    assert said["forked"].pop() == "True" and said["alone"].pop() == "False"
    assert said["forked"] == said["alone"] and str(os.getpid()) in said["alone"]


def test_a_module_and_a_folder_without_a_server(variables: dict[str, str], tmp_path: Path) -> None:
    for address in (variables["ROLLSPEC_TEST_WARM"], str(tmp_path / "none")):
        done = subprocess.run(
            [sys.executable, "-m", "json.tool"], input="[1]", capture_output=True, text=True, check=True,
            env={**os.environ, **variables, "ROLLSPEC_TEST_WARM": address},
        )  # fmt: skip
        assert done.stdout.split() == ["[", "1", "]"]


def answer(pipe: Any, number: int) -> None:
    pipe.send((number + 1, os.getpid()))


def sleep(pipe: Any) -> None:
    """With a child of its own."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    pipe.send((os.getpid(), child.pid))
    time.sleep(60)


def test_what_multiprocessing_spawns(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=answer, args=(there, 4))
    process.start()
    number, pid = here.recv()
    process.join(20)
    assert number == 5 and pid != process.pid and process.exitcode == 0
    for name, code in (("terminate", -signal.SIGTERM), ("kill", -signal.SIGKILL)):
        process = context.Process(target=sleep, args=(there,))
        process.start()
        pids = here.recv()
        getattr(process, name)()
        process.join(20)
        assert process.exitcode == code
        until(lambda pid=pids[0]: not alive(pid))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[1], signal.SIGKILL)


def test_all_of_them_end_with_the_server(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n")
    with started([]) as env:
        process = subprocess.Popen([sys.executable, path], stdout=subprocess.PIPE, text=True, env={**os.environ, **env})
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert pid != process.pid
    until(lambda: not alive(pid))
    assert process.wait(20) != 0
    process.stdout.close()


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
