"""A real `vllm serve` and a real daemon: it learns from the server's requests, the server swaps, and outlives it."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from served import Process, Server

from drafter_online.versions import Versions
from examples.production_traffic.servers import free_port

pytest.importorskip("speculators")
pytestmark = pytest.mark.engine

MAX_TOKENS = 64


@pytest.fixture
def started() -> Iterator[list[Process]]:
    processes: list[Process] = []
    yield processes
    for p in processes:
        p.end()


class Daemon(Process):
    """A trainer that learns quickly, and the settings of servers that learn from it."""

    def __init__(self, model: Path, folder: Path) -> None:
        from drafter_online import head as heads

        self.head = heads.save(heads.fresh(model), folder / "head")
        self.endpoint, self.page = f"ipc://{folder}/wire", f"http://127.0.0.1:{free_port()}"
        command = [
            sys.executable, "-m", "drafter_online.cli", "serve", "--target", str(model), "--head", str(self.head),
            "--dir", str(folder / "daemon"), "--endpoint", self.endpoint, "--port", self.page.rpartition(":")[2],
        ]  # fmt: skip
        command += ["--option", "publish_every=40", "--option", "dtype=float32", "--nice", "0"]
        super().__init__([*command, "--set", "learning_rate=3e-3", "--set", "batch_tokens=512"])

    def server(self, model: Path, **more: Any) -> Server:
        options = {
            "preset": "serve",
            "drafter.endpoint": self.endpoint,
            "drafter.capture.share": 1.0,
            "proposal.drafters": ["eagle3"],
            "proposal.head.k_max": 3,
            "proposal.head.model": str(self.head),
            "proposal.head.canary_drafts": 16,
            "proposal.budget.rule": "fixed",
            "tuning.strategy": "static",
            "tuning.guard.enabled": False,
            **more,
        }
        return Server(model, "--additional-config", json.dumps({"rollspec": options}))

    def status(self) -> dict[str, Any]:
        import requests

        return dict(requests.get(f"{self.page}/status", timeout=10).json())

    def engines(self) -> int:
        import requests

        try:
            return len(self.status()["engines"])
        except requests.RequestException:
            return 0


@pytest.fixture
def daemon(model: Path, started: list[Process], tmp_path: Path) -> Daemon:
    started.append(found := Daemon(model, tmp_path))
    return found


def asking(server: Server, prompts: list[list[int]]) -> Callable[..., list[str]]:
    """Greedy answers to the prompts; keywords are rollspec's settings of the request."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)

    def ask(**metadata: Any) -> list[str]:
        extra = {"extra_body": {"vllm_xargs": {"rollspec": json.dumps(metadata)}}} if metadata else {}
        answer = client.completions.create(
            model="policy", prompt=prompts, temperature=0.0, max_tokens=MAX_TOKENS, **extra
        )
        return [c.text for c in answer.choices]

    return ask


def test_a_daemon_learns_from_a_server_and_the_server_outlives_it(
    model: Path, prompts: list[list[int]], started: list[Process], daemon: Daemon
) -> None:
    started.append(server := daemon.server(model))
    server.wait()
    ask, status = asking(server, prompts), daemon.status
    daemon.wait_for(lambda: daemon.engines() == 1, 60)
    # Private requests are served, and nothing of them comes.
    first = ask(domain="secret", private=True)
    time.sleep(1.5)
    assert status()["feedback"]["samples"] == 0
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert ask(domain="arithmetic") == first, "greedy answers do not depend on the drafter"
        s = status()
        if s["versions"]["promoted"] and set(s["versions"]["running"].values()) != {0}:
            break
    running = s["versions"]["running"]
    assert s["versions"]["promoted"] and 0 not in running.values(), json.dumps(s)[:3000]
    assert s["domains"]["arithmetic"]["requests"] >= 6 and s["domains"]["secret"]["requests"] == 6
    assert s["domains"]["arithmetic"]["accepted"] > 0
    # The daemon is gone: nothing changes but that nothing is trained.
    daemon.end(signal.SIGKILL)
    begin = time.monotonic()
    while time.monotonic() - begin < 4:
        assert ask() == first
    assert server.process.poll() is None and "Traceback" not in server.said()


@pytest.mark.slow  # `test_canary.py` and `test_service.py` decide about versions among engines that are stand-ins
def test_of_two_servers_one_tries_a_version_and_one_that_comes_late_follows(
    model: Path, prompts: list[list[int]], started: list[Process], daemon: Daemon, tmp_path: Path
) -> None:
    """One head for both: what the first one's canary promoted runs in the second, which was never asked to try it."""
    from rollspec_trl.engines import Server as Asked

    started.append(first := daemon.server(model))
    first.wait()
    ask = asking(first, prompts)
    said = ask()

    def runs(server: Server) -> dict[str, Any]:
        return dict(Asked(server.url).call("info")["drafter"])

    def until(condition: Callable[[], Any], seconds: float, *asks: Callable[..., list[str]]) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, json.dumps(daemon.status())[:3000]
            for each in asks or (ask,):
                assert each() == said, "greedy answers do not depend on the drafter"

    until(lambda: runs(first)["version"], 180)
    started.append(late := daemon.server(model))
    late.wait()
    both = (ask, asking(late, prompts))
    # It begins with what runs elsewhere, and follows it from then on.
    begun = runs(first)["version"]
    until(lambda: runs(late)["version"] >= begun, 120, *both)
    until(lambda: runs(first)["version"] == runs(late)["version"] > begun, 240, *both)
    running = daemon.status()["versions"]["running"]
    assert len(running) == 2 and 0 not in running.values(), running
    promoted = [e.version for e in Versions(tmp_path / "daemon" / "versions").events() if e.verdict == "promoted"]
    assert len(promoted) == len(set(promoted)) > 1, "a version is judged once"
    assert runs(late)["version"] in promoted, "what was not tried runs in the second"
