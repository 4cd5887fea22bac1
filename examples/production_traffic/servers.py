"""A real `vllm serve` and a real `drafter-online serve` as child processes, ended with everything that they started."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.demo.processes import MARKER, Family, remove_segments
from rollspec.errors import RollspecError

START_SECONDS = 900.0  # a slow machine compiles for minutes
CORES = sorted(os.sched_getaffinity(0))
ENGINE_CORE, TRAINER_CORE = CORES[0], CORES[1 % len(CORES)]
"""The server has a core of its own in every arm, and the trainer the other one: the device and an idle one."""
TAIL = 3000  # characters of a log that are shown when its process ended


@dataclass(frozen=True)
class Server:
    """A server that answers, and the processes that are halted while others have their turn."""

    url: str
    families: tuple[Family, ...]

    def suspend(self) -> None:
        """Halt it."""
        for family in self.families:
            family.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        for family in self.families:
            family.signal(signal.SIGCONT)


@contextmanager
def running(
    name: str, command: list[str], core: int, log: Path, ready: Callable[[], bool], **env: str
) -> Iterator[Family]:
    """Run `command` on one core until the block ends.

    Raises:
        RollspecError: it ended, or was not `ready` in time; with the end of its log.
    """
    marker = uuid.uuid4().hex
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["taskset", "--cpu-list", str(core), *command], stdin=subprocess.DEVNULL, stdout=file,
            stderr=subprocess.STDOUT, start_new_session=True, env={**os.environ, MARKER: marker, **env},
        )  # fmt: skip
    family = Family(process.pid, marker)
    try:
        end = time.monotonic() + START_SECONDS
        while not ready():
            if process.poll() is not None or time.monotonic() > end:
                said = log.read_text(encoding="utf-8", errors="replace")[-TAIL:]
                raise RollspecError(f"{said}\n{name} did not come up; its whole log is {log}.")
            family.look()
            time.sleep(0.25)
        family.look()
        yield family
    finally:
        # `timeout` and an impatient user signal twice; the second one must not leave a server behind.
        handlers = {n: signal.signal(n, signal.SIG_IGN) for n in (signal.SIGTERM, signal.SIGINT)}
        try:
            family.stop(grace=20.0)
            process.wait()
            remove_segments(family.segments)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


@contextmanager
def server(
    model: str, name: str, folder: Path, rollspec: dict[str, Any] | None, most: int, dtype: str = "float32"
) -> Iterator[Server]:
    """`vllm serve` on the CPU. `rollspec`: options, None for a server without it."""
    url = f"http://127.0.0.1:{free_port()}"
    command = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, "--served-model-name", name,
        "--host", "127.0.0.1", "--port", url.rpartition(":")[2], "--dtype", dtype, "--max-model-len", "512",
        "--max-num-seqs", str(most), "--no-enable-prefix-caching", "--disable-uvicorn-access-log",
        "--async-scheduling",  # with rollspec and without: nothing but drafting differs
    ]  # fmt: skip
    if rollspec is not None:
        command += ["--additional-config", json.dumps({"rollspec": rollspec})]
    env = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    # The CPU build's bugs are mended in a server without rollspec, too: both sides sample from the same distribution.
    env |= {"ROLLSPEC_PATCHES": "cpu", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    with running(
        "vllm serve", command, ENGINE_CORE, folder / "server.log", lambda: answers(f"{url}/health"), **env
    ) as one:
        yield Server(url, (one,))


@contextmanager
def daemon(model: str, head: Path, folder: Path, endpoint: str, options: dict[str, Any]) -> Iterator[Server]:
    """`drafter-online serve`, which answers over HTTP."""
    url = f"http://127.0.0.1:{free_port()}"
    command = [
        sys.executable, "-m", "drafter_online.cli", "serve", "--target", model, "--head", str(head), "--dir",
        str(folder / "drafter"), "--endpoint", endpoint, "--port", url.rpartition(":")[2], "--threads", "1",
    ]  # fmt: skip
    for key, value in options.items():
        flag, _, knob = key.partition(".")
        command += [f"--{flag}", f"{knob}={value}"]
    log = folder / "daemon.log"
    # Clients of the server are on this core, too, and come first: their time is part of what is measured.
    command = ["nice", "-n", "10", *command]
    with running("drafter-online serve", command, TRAINER_CORE, log, lambda: answers(f"{url}/healthz")) as one:
        yield Server(url, (one,))


def answers(url: str) -> bool:
    """Whether there is a good answer."""
    import httpx

    try:
        return httpx.get(url, timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def free_port() -> int:
    """A port that no process listens at."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
