"""A real `vllm serve` and a real daemon: it learns from the server's requests, the server swaps, and outlives it.

Both are killed in the middle of a swap and started again.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from served import Process, Server, here

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

        self.head = folder / "head"
        if not self.head.exists():
            heads.save(heads.fresh(model), self.head)
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
        extension = ("--worker-extension-cls", "killed_swap.Worker")
        return Server(model, "--additional-config", json.dumps({"rollspec": options}), *extension, PYTHONPATH=here())

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


def answer_of(server: Server, method: str, *args: Any) -> Any:
    """What the server's worker answers (`killed_swap.Worker`)."""
    reply = server.worker_call(method, *args)
    reply.raise_for_status()
    return reply.json()["results"][0]


def killed_in_a_swap(server: Server, daemon: Daemon, ask: Callable[..., list[str]], said: list[str]) -> None:
    """The daemon learns until the server swaps; when half of the weights are copied, SIGKILL ends daemon and engine."""
    from openai import APIError

    answer_of(server, "die_in_a_swap", daemon.process.pid)

    def until_it_fails() -> None:
        end = time.monotonic() + 240
        while time.monotonic() < end:
            assert ask(domain="arithmetic") == said, "greedy answers do not depend on the drafter"

    with pytest.raises(APIError):
        until_it_fails()
    assert daemon.process.wait(60) == -signal.SIGKILL


def test_killed_in_a_swap_a_daemon_and_a_server_start_again_and_the_server_outlives_the_daemon(
    model: Path, prompts: list[list[int]], started: list[Process], daemon: Daemon, tmp_path: Path
) -> None:
    """Before the kill and after it the daemon learns from the server; what runs is always one whole version."""
    started.append(killed := daemon.server(model))
    killed.wait()
    ask = asking(killed, prompts)
    daemon.wait_for(lambda: daemon.engines() == 1, 60)
    first = ask(domain="secret", private=True)
    killed_in_a_swap(killed, daemon, ask, first)
    store = Versions(tmp_path / "daemon" / "versions")
    cut = [store.load(number).number for number in store.numbers()]
    assert cut and not store.events(), "a swap that was cut off has no verdict"
    started += [daemon := Daemon(model, tmp_path), server := daemon.server(model)]
    server.wait()
    ask, status = asking(server, prompts), daemon.status
    daemon.wait_for(lambda: daemon.engines() == 1, 60)
    assert status()["versions"]["latest"] == cut[-1]
    killed.process.wait(120)  # vLLM's front end ends by itself once its engine is gone
    # Private requests are served, and nothing of them comes.
    assert ask(domain="secret", private=True) == first
    time.sleep(1.5)
    assert status()["feedback"]["samples"] == 0
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert ask(domain="arithmetic") == first, "greedy answers do not depend on the drafter"
        s = status()
        running, asked = s["versions"]["running"], s["domains"].get("arithmetic", {"requests": 0, "accepted": 0})
        learns = s["training"]["steps"] and asked["requests"] >= 6 and asked["accepted"]
        if learns and s["versions"]["promoted"] and 0 not in running.values():
            break
    else:
        pytest.fail(json.dumps(s)[:3000])
    assert s["domains"]["secret"]["requests"] == 6
    ran = answer_of(server, "running_version", str(store.folder))
    assert ran["version"] >= cut[0] and ran["whole"], ran
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
