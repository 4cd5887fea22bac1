"""OpenRLHF's hooks on small stand-ins for Ray's actor classes; its real actors run in tests/e2e/test_openrlhf.py."""

from __future__ import annotations

import asyncio
import logging
from types import ModuleType
from typing import Any

import pytest
import rollspec_openrlhf
from rollspec_openrlhf import actors
from vllm_like import like, plays

from rollspec import RollspecConfig
from rollspec.engine import calls
from rollspec.errors import ConfigError
from rollspec.telemetry.engine_stats import EngineStats

STATS = EngineStats(steps=4, requests=8, verified=4, drafted=10, accepted=5, emitted=13, version=3).to_dict()


@plays("openrlhf.trainer.ray.vllm_engine:RolloutRayActor", "kwargs")
class Actor:
    """OpenRLHF's actor, as far as it is used."""

    async def __init__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[misc]
        self.kwargs = kwargs


def made(config: RollspecConfig, **kwargs: Any) -> Any:
    cls = actors.subclass(Actor, config)
    actor = cls.__new__(cls)
    asyncio.run(cls.__init__(actor, **kwargs))
    return actor


def test_the_engine_gets_the_configuration_and_keeps_its_own(tmp_path: Any) -> None:
    config = RollspecConfig.load({"preset": "suffix_only", "history.dir": str(tmp_path)})
    given = made(config, seed=43, worker_extension_cls="theirs", additional_config={"other": 1}).kwargs
    assert given["worker_extension_cls"] == "theirs" and given["additional_config"]["other"] == 1
    assert given["additional_config"]["rollspec"]["preset"] == "suffix_only"
    assert given["additional_config"]["rollspec"]["history"]["dir"] == str(tmp_path / "replica_43")


def test_a_call_never_raises_and_gives_up(caplog: pytest.LogCaptureFixture) -> None:
    actor = made(RollspecConfig.load())
    asked = []

    async def collective_rpc(method: str, *, args: Any) -> Any:
        asked.append(args)
        if len(asked) > 1:
            raise RuntimeError("dead")
        return [{}, {"state": "suffix"}]

    actor.llm = like("vllm.v1.engine.async_llm:AsyncLLM", collective_rpc=collective_rpc)
    assert asyncio.run(actor.rollspec_call("info", {})) == {"state": "suffix"}
    with caplog.at_level(logging.ERROR, "rollspec"):
        for _ in range(5):
            assert "error" in asyncio.run(actor.rollspec_call("stats", {}))
    assert len(asked) == 1 + calls.MOST_FAILURES


def trainer_module() -> Any:
    @plays("openrlhf.trainer.ppo_trainer:PPOTrainer")
    class PPOTrainer:
        def __init__(self) -> None:
            engine = like("ray.actor:ActorHandle")
            engine.rollspec_call = like("ray.actor:ActorMethod", remote=lambda *args: args)  # its actor's method
            self.vllm_engines = [engine]

        def train_step(self, samples: Any, global_step: int) -> Any:
            return {"theirs": 1}, global_step + 1

    found = ModuleType("ppo_trainer")
    actor = like("ray.actor:ActorClass")
    actor.__ray_metadata__ = like("ray.actor:_ActorClassMetadata", modified_class=PPOTrainer)  # which Ray sets on it
    found.PPOTrainer = actor  # type: ignore[attr-defined]
    actors.install_trainer(found, "PPOTrainer")
    actors.install_trainer(found, "PPOTrainer")  # a second time changes nothing
    return PPOTrainer


def test_a_step_reports_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "collect", lambda pending: [STATS, {"error": "gone"}])
    status, step = trainer_module()().train_step(None, 4)
    assert step == 5 and status["theirs"] == 1
    assert status["rollspec/accept/rate"] == 0.5 and status["rollspec/faults"] == 1


def test_a_failure_leaves_the_step_as_it_was(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(actors, "collect", lambda pending: 1 / 0)
    t = trainer_module()()
    for _ in range(2):
        assert t.train_step(None, 4) == ({"theirs": 1}, 5)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("name", ["PPOTrainer", "RolloutRayActor"])
def test_another_shape_is_said_and_left_alone(name: str, caplog: pytest.LogCaptureFixture) -> None:
    found = ModuleType("found")
    setattr(found, name, object())
    if name == "PPOTrainer":
        actors.install_trainer(found, name)
    else:
        pytest.importorskip("ray")
        actors.install_engine(found, RollspecConfig.load())
    assert len(caplog.records) == 1 and "not as expected" in caplog.text


def test_another_version_or_none_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from importlib import metadata

    registered: list[Any] = []
    monkeypatch.setattr(rollspec_openrlhf, "on_import", lambda module, install: registered.append(module))
    monkeypatch.setattr(metadata, "version", lambda name: "0.10.0")
    rollspec_openrlhf.enable()
    assert registered == [] and "0.10.0 is outside the tested range" in caplog.text
    monkeypatch.setattr(metadata, "version", lambda name: "0.11.2")
    rollspec_openrlhf.enable("suffix_only")
    assert len(registered) == 3
    with pytest.raises(ConfigError):
        rollspec_openrlhf.enable("no_such")
