"""A daemon that trains on the device of an engine: only while that engine leaves it, and for all engines."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("speculators")

from fake_engine import FakeEngine, checkpoint, feed  # noqa: E402
from running_service import Services  # noqa: E402
from wire_ends import until  # noqa: E402

from drafter_online import activity, startup  # noqa: E402
from drafter_online.activity import Activity  # noqa: E402
from drafter_online.errors import ServiceError  # noqa: E402
from drafter_online.service import Service  # noqa: E402
from drafter_online.trainer import Trainer  # noqa: E402


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Activity:
    """Of an engine."""
    monkeypatch.setattr(activity, "LOOK_SECONDS", 0.0)
    made = Activity()
    assert made.show(tmp_path / "devices" / "cpu")
    return made


def still(service: Service, engine: FakeEngine, seconds: float = 0.4) -> bool:
    """No step is made any more."""
    time.sleep(0.2)
    before, end = service.trainer.counts.steps, time.monotonic() + seconds
    while time.monotonic() < end:
        engine.turn()
    return service.trainer.counts.steps == before


def test_it_trains_while_the_engine_does_not(
    services: Services, tiny_target: Path, device: Activity, tmp_path: Path
) -> None:
    service = services(yields_to=tmp_path / "devices", passes=1e6, job=True)
    engine, other = FakeEngine(service, "its own"), FakeEngine(service, "another")
    device.begins()
    feed(engine, tiny_target)
    assert still(service, engine) and service.trainer.counts.steps == 0, "a step is being computed"
    device.ends()
    engine.until(lambda: engine.version)
    other.until(lambda: other.version, 30)
    device.away = True
    assert still(service, engine)
    saved = tmp_path / "checkpoint"
    saved.mkdir()
    assert checkpoint(engine, "save", saved)["done"], "a job saves while its trainer has the device"
    device.away = False
    steps = service.trainer.counts.steps
    engine.until(lambda: service.trainer.counts.steps > steps)
    body = engine.until(lambda: next((m.body for m in reversed(engine.others) if m.kind == "status"), None))
    assert body["idle"]["used_seconds"] > 0.0 and body["idle"]["idle_seconds"] >= body["idle"]["used_seconds"]
    assert body["levels"]["micro_step_seconds"] > 0.0 and not body["levels"]["idle_cost"]


def test_an_engine_that_begins_a_step_does_not_wait_for_a_micro_step(
    services: Services, tiny_target: Path, device: Activity, tmp_path: Path
) -> None:
    service = services(yields_to=tmp_path / "devices", passes=1e6)
    engine = FakeEngine(service)
    feed(engine, tiny_target)
    engine.until(lambda: service.trainer.counts.steps > 0)
    inside, asked = threading.Event(), threading.Event()
    forward = service.trainer._forward

    def slow(batch: object, interrupt: object) -> object:
        inside.set()
        asked.wait(20)
        return forward(batch, interrupt)  # type: ignore[arg-type]

    service.trainer._forward = slow  # type: ignore[method-assign,assignment]
    assert inside.wait(20)
    device.begins()
    asked.set()
    until(lambda: service.trainer.counts.preempted == 1)
    until(lambda: service.idle.levels["preempt_seconds"] > 0.0)
    assert service.idle.counts.wasted > 0.0 and still(service, engine)
    device.ends()


def test_without_an_engine_it_waits(services: Services, tiny_target: Path, tmp_path: Path) -> None:
    service = services(yields_to=tmp_path / "empty")
    engine = FakeEngine(service)
    feed(engine, tiny_target)
    assert still(service, engine) and service.trainer.counts.steps == 0


def test_samples_that_wait_for_an_engine_to_show_itself_are_an_alarm(
    services: Services, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activity, "MISSING_SECONDS", 0.0)
    service = services(yields_to=tmp_path / "empty")
    engine = FakeEngine(service)
    service.tick()
    assert "device" not in [a.kind for a in service.alarms], "nothing is to be trained yet"
    feed(engine, tiny_target)
    until(lambda: service.tick() or "device" in [a.kind for a in service.alarms])


def test_it_goes_to_the_engines_device_with_all_that_it_has(
    services: Services, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activity, "LOOK_SECONDS", 0.0)
    there = [SimpleNamespace(uuid="5f-b"), SimpleNamespace(uuid="5f-a")]  # torch's class is not in Python: no `like`
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(there))
    monkeypatch.setattr(torch.cuda, "get_device_properties", there.__getitem__)
    gone: list[str] = []
    monkeypatch.setattr(Trainer, "to", lambda self, device: gone.append(device))  # stands in for a GPU
    freed: list[int] = []
    monkeypatch.setattr(Trainer, "lends", lambda self: freed.append(self.counts.steps))
    service = services(yields_to=tmp_path / "devices", passes=1e6)
    engine, device = FakeEngine(service), Activity()
    feed(engine, tiny_target)
    assert still(service, engine) and not gone
    assert device.show(tmp_path / "devices" / "GPU-5f-a")
    engine.until(lambda: service.trainer.counts.steps > 0)
    assert gone == ["cuda:1"], "once, as this process calls it"
    device.away = True
    until(lambda: freed)
    assert still(service, engine) and len(freed) == 1
    with pytest.raises(ServiceError, match="GPU-5f-c is none of those that the trainer sees"):
        startup.torch_device("GPU-5f-c")


def test_rounds_are_trained_where_they_pay(services: Services, tiny_target: Path) -> None:
    service = services(train_when="pays", passes=1e6)
    engine = FakeEngine(service)
    feed(engine, tiny_target)
    assert service.when is not None and still(service, engine) and service.trainer.counts.steps == 0, "no feedback"
    engine.domains = {"other": [1, 10, 0, 0, 0, 12]}
    engine.until(lambda: service.trainer.counts.steps == 15)
    assert still(service, engine) and service.trainer.counts.steps == 15, "one round of publish_every steps"
    assert service.when.rounds == 1 and service.when.cost > 0.0
