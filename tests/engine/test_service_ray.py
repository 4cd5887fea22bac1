"""Where Ray runs, the trainer of a job is one named actor: every replica finds it, and it ends with them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from engines import until

from rollspec import RollspecConfig
from rollspec.engine import daemon

ray = pytest.importorskip("ray")
pytest.importorskip("speculators")
pytestmark = pytest.mark.engine

if TYPE_CHECKING:
    from drafter_online.link import Link


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Ray in this process, and its traces in the environment undone: whole jobs of later tests start with that."""
    with mock.patch.dict(os.environ):  # among them how clusters authenticate
        ray.init(
            num_cpus=1, resources={"trainer": 1}, include_dashboard=False, log_to_driver=False, configure_logging=False
        )
        yield
        ray.shutdown()


def config(folder: Path, place: dict[str, int], mode: str = "dedicated") -> RollspecConfig:
    given: dict[str, Any] = {
        "proposal.drafters": ["eagle3"], "drafter.mode": mode, "drafter.dir": str(folder),
        "drafter.ray.resources": place,
    }  # fmt: skip
    return RollspecConfig.load(given, env={})


def replica(settled: RollspecConfig, model: Path) -> Link:
    """What an engine is to its trainer."""
    from drafter_online import architecture, wire
    from drafter_online.link import Link

    target = architecture.target_config(model)
    hello = {
        "name": "replica",
        "base": architecture.base_of(target),
        "aux": architecture.aux_layers(target.num_hidden_layers),
    }
    return Link(str(settled.drafter.endpoint), hello, token=wire.read_token(None))


@pytest.fixture
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    from drafter_online import wire

    monkeypatch.setenv(wire.TOKEN_VARIABLE, "")  # set by what is tested, and unset after it
    monkeypatch.delenv(wire.TOKEN_VARIABLE)


@pytest.mark.modes
@pytest.mark.slow  # `test_replicas_of_a_job_share_one_process_that_ends_with_them` is its sibling without Ray
def test_ray_starts_a_trainer_again_and_its_engines_find_it(
    cluster: None, no_token: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Beside an engine (`drafter.mode: idle`), whose device it is on. What teaches the head finds it as well."""
    from rollspec_verl import teacher

    from drafter_online import wire

    given = config(tmp_path / "d", {}, "idle")
    settled = daemon.settle(given, str(model))
    assert settled.drafter.mode == "idle"
    link = replica(settled, model)
    until(lambda: link.poll(0.05) is not None and link.ready)
    assert teacher._of_job() == (settled.drafter.endpoint, wire.read_token(None))
    name = daemon.actor_name(ray)
    lock = tmp_path / "d" / "lock"
    first = lock.read_text()
    ray.kill(ray.get_actor(name), no_restart=False)
    until(lambda: lock.read_text() not in ("", first))
    until(lambda: link.poll(0.05) is not None and link.counts["lost"] > 0 and link.ready)
    assert link.counts["sessions"] > 1
    assert daemon.settle(given, str(model)) == settled
    # The next job of the cluster wants the folder: not while an engine uses the trainer, and at once when it is gone.
    again = lock.read_text()
    monkeypatch.setattr(daemon, "actor_name", lambda _: f"{daemon.ACTOR}next")
    assert daemon.settle(given, str(model)).drafter.mode == "off" and "is in use by another daemon" in caplog.text
    link.close()
    time.sleep(1.0)  # until the trainer knows it
    assert daemon.settle(given, str(model)).drafter.mode == "idle" and lock.read_text() != again
    ray.kill(ray.get_actor(f"{daemon.ACTOR}next"))


@pytest.mark.slow  # `test_replicas_of_a_job_share_one_process_that_ends_with_them` is its sibling without Ray
def test_replicas_share_one_actor(
    cluster: None, no_token: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from drafter_online import wire

    monkeypatch.setattr(daemon, "LINGER", 5.0)  # ten times as long for the first engine, and none comes to stay
    given = config(tmp_path / "d", {"trainer": 1})
    first = daemon.settle(given, str(model))
    token = wire.read_token(None)
    assert first.drafter.mode == "dedicated" and token is not None
    assert daemon.settle(given, str(model)).drafter.endpoint == first.drafter.endpoint
    assert wire.read_token(None) == token and token not in str(first.to_dict())
    link = replica(first, model)
    until(lambda: link.poll(0.05) is not None and link.ready)
    link.close()

    def gone() -> bool:
        try:
            ray.get_actor(daemon.actor_name(ray))
        except ValueError:
            return True
        return False

    until(gone, 180)


def test_an_actor_that_fits_nowhere_is_said_to(
    cluster: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(daemon, "START_SECONDS", 2.0)
    settled = daemon.settle(config(tmp_path, {"elsewhere": 2}), str(model))
    assert settled.drafter.mode == "off"
    assert "no node of the Ray cluster had" in caplog.text and "'elsewhere': 2.0" in caplog.text
