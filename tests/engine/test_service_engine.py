"""A real `vllm serve` and a real daemon: it learns from the server's requests, the server swaps, and outlives it."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import Process, Server

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


def test_a_daemon_learns_from_a_server_and_the_server_outlives_it(
    model: Path, prompts: list[list[int]], started: list[Process], tmp_path: Path
) -> None:
    import requests
    from openai import OpenAI

    from drafter_online import head as heads

    head = heads.save(heads.fresh(model), tmp_path / "head")
    endpoint, page = f"ipc://{tmp_path}/wire", f"http://127.0.0.1:{free_port()}"
    command = [
        sys.executable, "-m", "drafter_online.cli", "serve", "--target", str(model), "--head", str(head),
        "--dir", str(tmp_path / "daemon"), "--endpoint", endpoint, "--port", page.rpartition(":")[2],
    ]  # fmt: skip
    command += ["--option", "publish_every=40", "--option", "dtype=float32", "--nice", "0"]
    daemon = Process([*command, "--set", "learning_rate=3e-3", "--set", "batch_tokens=512"])
    started.append(daemon)
    options = {
        "preset": "serve",
        "drafter.endpoint": endpoint,
        "drafter.capture.share": 1.0,
        "proposal.drafters": ["eagle3"],
        "proposal.head.k_max": 3,
        "proposal.head.model": str(head),
        "proposal.head.canary_drafts": 16,
        "proposal.budget.rule": "fixed",
        "tuning.strategy": "static",
        "tuning.guard.enabled": False,
    }
    server = Server(model, "--additional-config", json.dumps({"rollspec": options}))
    started.append(server)
    server.wait()
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)

    def ask(**metadata: Any) -> list[str]:
        extra = {"extra_body": {"vllm_xargs": {"rollspec": json.dumps(metadata)}}} if metadata else {}
        answer = client.completions.create(
            model="policy", prompt=prompts, temperature=0.0, max_tokens=MAX_TOKENS, **extra
        )
        return [c.text for c in answer.choices]

    def status() -> dict[str, Any]:
        return dict(requests.get(f"{page}/status", timeout=10).json())

    def connected() -> bool:
        try:
            return len(status()["engines"]) == 1
        except requests.RequestException:
            return False

    daemon.wait_for(connected, 60)
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
    # The daemon is gone: nothing changes but that nobody learns.
    daemon.end(signal.SIGKILL)
    begin = time.monotonic()
    while time.monotonic() - begin < 4:
        assert ask() == first
    assert server.process.poll() is None and "Traceback" not in server.said()
