"""Where Ray runs, the trainer of a job is one named actor: every replica finds it, and it ends with them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollspec import RollspecConfig
from rollspec.engine import daemon

ray = pytest.importorskip("ray")
pytest.importorskip("speculators")
pytestmark = pytest.mark.engine


@pytest.fixture
def cluster() -> Iterator[None]:
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def test_replicas_share_one_actor(cluster: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from drafter_online import head as heads
    from drafter_online import wire
    from drafter_online.link import Link

    monkeypatch.setattr(daemon, "LINGER", 2.0)
    monkeypatch.delenv(wire.TOKEN_VARIABLE, raising=False)
    given: dict[str, Any] = {
        "proposal.drafters": ["eagle3"], "drafter.mode": "dedicated", "drafter.dir": str(tmp_path / "d"),
    }  # fmt: skip
    config = RollspecConfig.load(given, env={})
    first = daemon.settle(config, str(model))
    token = wire.read_token(None)
    assert first.drafter.mode == "dedicated" and token is not None
    assert daemon.settle(config, str(model)).drafter.endpoint == first.drafter.endpoint
    assert wire.read_token(None) == token and "token" not in str(first.to_dict().get("drafter", {}).values())
    target = heads.target_config(model)
    hello = {"name": "replica", "base": heads.base_of(target), "aux": heads.aux_layers(target.num_hidden_layers)}
    link = Link(str(first.drafter.endpoint), hello, token=token)
    until(lambda: link.poll(0.05) is not None and link.ready)
    link.close()
    name = f"rollspec-drafter-{ray.get_runtime_context().get_job_id()}"

    def gone() -> bool:
        try:
            ray.get_actor(name)
        except ValueError:
            return True
        return False

    until(gone)


def until(condition: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.1)
