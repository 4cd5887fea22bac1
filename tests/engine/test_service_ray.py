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
    ray.init(
        num_cpus=1, resources={"trainer": 1}, include_dashboard=False, log_to_driver=False, configure_logging=False
    )
    yield
    ray.shutdown()


@pytest.mark.slow  # `test_replicas_of_a_job_share_one_process_that_ends_with_them` is its sibling without Ray
def test_replicas_share_one_actor(cluster: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from drafter_online import architecture, wire
    from drafter_online.link import Link

    monkeypatch.setattr(daemon, "LINGER", 5.0)  # ten times as long for the first engine, and none comes to stay
    monkeypatch.setenv(wire.TOKEN_VARIABLE, "")  # set by what is tested, and unset after it
    monkeypatch.delenv(wire.TOKEN_VARIABLE)
    given: dict[str, Any] = {
        "proposal.drafters": ["eagle3"], "drafter.mode": "dedicated", "drafter.dir": str(tmp_path / "d"),
        "drafter.ray.resources": {"trainer": 1},
    }  # fmt: skip
    config = RollspecConfig.load(given, env={})
    first = daemon.settle(config, str(model))
    token = wire.read_token(None)
    assert first.drafter.mode == "dedicated" and token is not None
    assert daemon.settle(config, str(model)).drafter.endpoint == first.drafter.endpoint
    assert wire.read_token(None) == token and token not in str(first.to_dict())
    target = architecture.target_config(model)
    hello = {
        "name": "replica",
        "base": architecture.base_of(target),
        "aux": architecture.aux_layers(target.num_hidden_layers),
    }
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

    until(gone, 180)


def test_an_actor_that_fits_nowhere_is_said_to(
    cluster: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(daemon, "START_SECONDS", 2.0)
    given: dict[str, Any] = {
        "proposal.drafters": ["eagle3"], "drafter.mode": "dedicated", "drafter.dir": str(tmp_path),
        "drafter.ray.resources": {"elsewhere": 2},
    }  # fmt: skip
    config = daemon.settle(RollspecConfig.load(given, env={}), str(model))
    assert config.drafter.mode == "off"
    assert "no node of the Ray cluster had" in caplog.text and "'elsewhere': 2.0" in caplog.text


def until(condition: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.1)
