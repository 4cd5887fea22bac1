"""`vllm serve` and other commands as child processes of the tests, ended with the test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from engines import KV_BYTES, MAX_LEN

from examples.production_traffic.servers import answers, free_port


class Process:
    """A command whose output goes to a file."""

    def __init__(self, command: list[str], **env: str) -> None:
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, **env},
        )  # fmt: skip

    def wait_for(self, ready: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not ready():
            if self.process.poll() is not None or time.monotonic() > end:
                pytest.fail(f"it did not come up:\n{self.said()[-4000:]}")
            time.sleep(0.25)

    def said(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def end(self, number: int = signal.SIGINT) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


VLLM = (str(Path(sys.executable).with_name("vllm")), "serve")
TRL = (str(Path(sys.executable).with_name("trl")), "vllm-serve", "--model")
"""What starts a server; the model comes next."""


class Server(Process):
    """A small server of `policy`: `vllm serve`, or `trl vllm-serve`."""

    def __init__(self, model: Path, *options: str, program: tuple[str, ...] = VLLM, **env: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [
            sys.executable, *program, str(model), "--host", "127.0.0.1",
            "--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-model-len", str(MAX_LEN),
            "--max-num-seqs", "16", "--kv-cache-memory-bytes", str(KV_BYTES), "--no-enable-prefix-caching",
            "--served-model-name", "policy", *options,
        ]  # fmt: skip
        super().__init__(command, VLLM_SERVER_DEV_MODE="1", **env)

    def wait(self) -> None:
        self.wait_for(lambda: answers(f"{self.url}/health"), 240)

    def worker_call(self, method: str, *args: Any) -> Any:
        """The HTTP response to a call of its worker's method."""
        import requests

        return requests.post(f"{self.url}/collective_rpc", json={"method": method, "args": args}, timeout=60)


def here() -> str:
    """PYTHONPATH of a server whose worker extension is a module of this folder."""
    return os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))


def counted(server: str, name: str) -> float:
    """One of the metrics of the server at this URL."""
    import requests

    lines = requests.get(f"{server}/metrics", timeout=10).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))
