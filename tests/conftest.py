"""What every test relies on: the environment of the CPU engine, bounded subprocesses, and no left-overs between tests.

An engine test may start vLLM in this process or in another; a test that dies half way leaves worker processes and
shared memory behind, which would slow or break the tests after it. So after each `engine` and `e2e` test its surviving
descendants are ended, and the shared-memory segments that appeared during it are removed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import psutil

pytest_plugins = ["passed_tests"]

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "2",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "WANDB_MODE": "offline",
}
"""The one place where the tests' environment is set. Before any import: vllm, torch and ray read it when they load."""

for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
# What the developer's shell switches on must not reach a test: a test that wants it sets it.
for _name in [n for n in os.environ if n == "ROLLSPEC" or n.startswith("ROLLSPEC__")]:
    del os.environ[_name]

SHM = Path("/dev/shm")
GRACE = 5.0  # seconds that processes get between TERM and KILL


def run_bounded(
    cmd: Sequence[str | os.PathLike[str]],
    timeout: float,
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `cmd` in a process group of its own and return its output (stderr folded into stdout).

    After `timeout` seconds the whole group is killed and `returncode` is 124, as of timeout(1): a hung engine must
    cost a test its limit, not the session. `env` is added to this process's environment.
    """
    # A file, not a pipe: a daemon that outlives its parent (Ray's do) would hold a pipe open, and the reader with it.
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(
            [os.fspath(c) for c in cmd],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            cwd=cwd,
            start_new_session=True,
        )
        note = ""
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code, note = 124, f"\n[run_bounded: killed after {timeout:g} s]\n"
        finally:
            # Also after a normal end: what it left running would hold the machine for the tests after it.
            _kill_group(process.pid)
            process.wait()
        out.seek(0)
        text = out.read().decode(errors="replace") + note
    return subprocess.CompletedProcess(list(map(os.fspath, cmd)), code, text, "")


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


@pytest.fixture(name="run_bounded")
def _run_bounded() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`run_bounded` for tests, which cannot import conftest by name."""
    return run_bounded


@pytest.fixture(autouse=True, scope="session")
def _no_leftovers_at_the_end(request: pytest.FixtureRequest) -> Iterator[None]:
    """The same for engines that a fixture of wider scope keeps for several tests."""
    if any(_starts_engines(item) for item in request.session.items):
        with _tidy():
            yield
    else:
        yield


@pytest.fixture(autouse=True)
def _no_leftovers(request: pytest.FixtureRequest, _no_leftovers_at_the_end: None) -> Iterator[None]:
    """End what an engine or e2e test leaves running, and remove the shared memory it leaves behind.

    Fixtures of wider scope are set up before this one, so an engine that several tests share is left to them.
    """
    if _starts_engines(request.node):
        with _tidy():
            yield
    else:
        yield


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """In a worker of pytest-xdist, whose own count is not printed: hand it on."""
    output = getattr(items[0].config, "workeroutput", None)
    if output is not None:
        output["deselected"] = output.get("deselected", 0) + len(items)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Each worker leaves out the same tests: they are counted once, in the closing line."""
    reporter = node.config.pluginmanager.get_plugin("terminalreporter")
    if count := getattr(node, "workeroutput", {}).get("deselected", 0):
        reporter.stats["deselected"] = [SimpleNamespace()] * count


def _starts_engines(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(m) for m in ("engine", "e2e"))


@contextlib.contextmanager
def _tidy() -> Iterator[None]:
    import psutil
    from orphans import adopt

    adopt()
    me = psutil.Process()
    before = {(p.pid, p.create_time()) for p in me.children(recursive=True)}
    segments = _segments()
    yield
    _end([p for p in me.children(recursive=True) if (p.pid, p.create_time()) not in before and not _keeper(p)])
    for name in _segments() - segments:
        _remove_unmapped(SHM / name)


def _keeper(process: psutil.Process) -> bool:
    """Python's own resource tracker lives as long as this process; ending it would break later shared memory."""
    import psutil

    try:
        return process.ppid() == os.getpid() and any("resource_tracker" in part for part in process.cmdline())
    except psutil.Error:
        return True


def _end(processes: list[psutil.Process]) -> None:
    import psutil

    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=GRACE)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=GRACE)


def _segments() -> set[str]:
    return {p.name for p in SHM.glob("psm_*")} if SHM.is_dir() else set()


def _remove_unmapped(segment: Path) -> None:
    """Remove a segment of ours that no living process has mapped or open."""
    with contextlib.suppress(FileNotFoundError):
        stat = segment.stat()
        young = time.time() - stat.st_ctime < GRACE  # another job's, made but not mapped yet
        if stat.st_uid == os.getuid() and not young and not _in_use(segment):
            segment.unlink()


def _in_use(segment: Path) -> bool:
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            if str(segment) in (process / "maps").read_text():
                return True
        except OSError:  # ended meanwhile, or another user's, which cannot map our private segment
            continue
    return False
