"""The daemon with a tiny real head: it learns from what engines send, publishes, survives, and comes back."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("speculators")
pytest.importorskip("fastapi")

from drafter_target import sample  # noqa: E402
from fake_engine import FakeEngine, checkpoint, feed  # noqa: E402
from running_service import TRAINING, Services  # noqa: E402
from wire_ends import until  # noqa: E402

from drafter_online import head as heads  # noqa: E402
from drafter_online.errors import VersionError  # noqa: E402
from drafter_online.status import list_versions, status  # noqa: E402
from drafter_online.wire import Message  # noqa: E402


def test_an_engine_feeds_it_and_gets_versions(services: Services, tiny_target: Path) -> None:
    service = services()
    engine = FakeEngine(service)
    feed(engine, tiny_target, errors=2)
    engine.until(lambda: engine.version >= 2)
    engine.until(lambda: [e.verdict for e in service.versions.events()].count("promoted") >= 2)
    engine.until(lambda: service.versions.promoted() == service.release.current and service.release.current)
    s = status(service)
    assert s["training"]["steps"] >= 30 and s["feedback"]["samples"] == 8 and s["versions"]["published"] >= 2
    assert s["engines"][0]["name"] == "engine" and s["versions"]["lag_seconds"] < 60
    assert not s["alarms"]
    engine.link.close()
    until(lambda: not len(service.hub), seconds=90)


def test_training_waits_for_new_feedback(services: Services, tiny_target: Path) -> None:
    service = services(passes=2.0)
    engine = FakeEngine(service)
    feed(engine, tiny_target, 4)
    engine.until(lambda: service.training == "waiting for new feedback")
    steps = service.trainer.counts.steps
    time.sleep(0.5)
    assert service.trainer.counts.steps == steps and steps <= 4
    feed(engine, tiny_target, 4, 10)
    engine.until(lambda: service.trainer.counts.steps > steps)


def test_one_engine_tries_a_version_and_the_others_follow(services: Services, tiny_target: Path) -> None:
    service = services(passes=20.0)
    first, second = FakeEngine(service, "first", "silent"), FakeEngine(service, "second")
    feed(first, tiny_target)
    first.until(lambda: first.offers)
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        second.turn()
        first.turn()
    assert not second.offers, "it is on canary elsewhere"
    number = first.offers[0]["version"]
    first.verdicts.append([number, "promoted", "2 of 3"])
    first.version, first.verdict = number, "promoted"
    first.until(lambda: (second.turn(), second.version >= number)[1])
    assert any(o["canary"] for o in second.offers)
    event = service.versions.events()[0]
    assert (event.version, event.verdict) == (number, "promoted") and event.reason.startswith("first: ")


def test_what_an_engine_rolls_back_is_noted_and_an_alarm(services: Services, tiny_target: Path) -> None:
    service = services(passes=1000.0)
    engine = FakeEngine(service, verdict="rolled_back")
    feed(engine, tiny_target)
    engine.until(lambda: service.versions.events())
    first = engine.offers[0]["version"]
    assert service.versions.events()[0].verdict == "rolled_back" and service.release.current is None
    engine.until(lambda: "rollback" in [a.kind for a in service.alarms])
    engine.until(lambda: len(engine.offers) > 1)
    assert engine.offers[1]["version"] > first, "training went on, and the next version is tried"
    engine.verdict = "promoted"
    engine.until(lambda: engine.version > 0)
    engine.until(lambda: "rollback" not in [a.kind for a in service.alarms])


def test_a_canary_without_a_verdict_is_given_to_one_more(services: Services, tiny_target: Path) -> None:
    service = services(patience=0.5)
    first, second = FakeEngine(service, "first", "silent"), FakeEngine(service, "second")
    feed(first, tiny_target)
    first.until(lambda: first.offers)
    second.until(lambda: second.version)


def test_promote_and_roll_back_by_hand(services: Services, tiny_target: Path) -> None:
    service = services()
    engine = FakeEngine(service)
    feed(engine, tiny_target)
    engine.until(lambda: engine.version >= 2)
    service._stop.set()  # no more training
    service._thread.join()
    engine.until(lambda: service.release.current == engine.version and service.release.candidate is None)
    bad, good = engine.version, service.release.current
    old = min(n for n in service.versions.numbers())
    runs = service.release.promote(old)
    assert runs > bad
    engine.until(lambda: engine.version == runs)
    same = [service.versions.load(n).tensors for n in (old, engine.version)]
    assert all(torch.equal(t, same[1][n]) for n, t in same[0].items())
    assert engine.offers[-1]["canary"] is False
    back = service.release.rollback(engine.version)
    engine.until(lambda: engine.version == back)
    copy = service.versions.manifest(engine.version)
    assert copy.provenance["copy_of"] == good
    rows = list_versions(service.versions, service.release.current)
    assert rows[-1]["promoted"] and rows[-1]["copy_of"] == good
    with pytest.raises(VersionError, match="not in the store"):
        service.release.rollback(99999)
    with pytest.raises(VersionError, match="not in"):
        service.release.promote(99999)
    service.hub.close()
    os.close(service._lock_file)


def test_a_draft_model_is_trained_from_samples_without_auxiliary_states(services: Services, tiny_target: Path) -> None:
    service = services(head=str(tiny_target), publish_every=4)
    assert service.trainer.drafter.kind == "draft_model" and service.trainer.drafter.aux == ()
    engine = FakeEngine(service, aux=[])
    engine.until(lambda: engine.link.ready)
    for i in range(4):
        made = sample(tiny_target, i, errors=1)
        tensors, record = dataclasses.replace(made, hidden_states=made.hidden_states[:, :0]).parts()
        engine.link.send(Message("samples", record, tensors))
    engine.until(lambda: engine.version)
    assert service.versions.manifest(engine.version).kind == "draft_model" and not service.hub.counts["failed"]


def test_rolling_the_first_version_back_brings_the_first_head(
    services: Services, tiny_target: Path, given_head: Path
) -> None:
    service = services(passes=2.0, publish_every=4)
    engine = FakeEngine(service)
    feed(engine, tiny_target, 8)
    engine.until(lambda: engine.version)
    engine.until(lambda: service.training != "running" and service.release.candidate is None)
    for event in service.versions.events()[:-1]:
        service.versions.record(event.version, "rolled_back")
    back = service.release.rollback(engine.version)
    engine.until(lambda: engine.version == back)
    start = heads.own_weights(heads.load(given_head, tiny_target))
    assert all(torch.equal(t, start[n]) for n, t in service.versions.load(engine.version).tensors.items())


@pytest.mark.parametrize(
    "change",
    [
        {"input_ids": torch.full((24,), 1000)},
        {"hidden_states": torch.zeros(24, 64), "verifier_last_hidden_states": torch.zeros(24, 64)},
        {"hidden_states": torch.full((24, 96), float("nan"))},
        {"loss_mask": torch.zeros(24, dtype=torch.bool)},
        {"position_ids": torch.zeros(24, dtype=torch.int64)},
    ],
)
def test_samples_that_do_not_fit_are_refused(services: Services, tiny_target: Path, change: dict[str, Any]) -> None:
    service = services()
    engine = FakeEngine(service)
    engine.until(lambda: engine.link.ready)
    tensors, record = sample(tiny_target, 0).parts()
    engine.link.send(Message("samples", record, {**tensors, **change}))
    engine.link.send(Message("samples", {"request_id": 1}, tensors))
    engine.link.send(Message("status", {"version": "seven"}))
    engine.link.send(Message("rewards", {"a": "b"}))
    engine.link.send(Message("fetch", {"version": 1, "file": "../../secret", "offset": 0}))
    engine.link.send(Message("target", {"sender": "x"}, {"rows": torch.zeros(2)}))
    feed(engine, tiny_target, 4)
    engine.until(lambda: service.trainer.counts.steps > 2)
    refused = (
        sum(n for k, n in service.hub.counts.items() if k.startswith("refused/")) + service.counts["refused_samples"]
    )
    assert refused == 6 and service.trains and service.hub.counts["failed"] == 0
    assert status(service)["training"]["failed"] == 0


def test_engines_of_other_targets_are_refused_in_one_sentence(services: Services) -> None:
    service = services()
    for hello, word in (({"base": "another"}, "'another'"), ({"aux": [1, 2, 4]}, "layers")):
        engine = FakeEngine(service, **hello)
        engine.until(lambda e=engine: e.link.away != "it has not answered yet")
        assert word in str(engine.link.away) and not engine.link.ready
    assert not list(service.engines)


@pytest.mark.parametrize("rejected", [0.0, 0.5])
def test_engines_learn_whether_it_learns_from_what_was_rejected(services: Services, rejected: float) -> None:
    engine = FakeEngine(services(training={**TRAINING, "rejected": rejected}))
    engine.until(lambda: engine.link.away is None)
    assert engine.link.welcome == {"rejected": rejected > 0}


def test_rewards_and_the_moving_target_reach_the_training(services: Services, tiny_target: Path) -> None:
    service = services(recency=0)
    engine = FakeEngine(service)
    feed(engine, tiny_target, 6, target_version=3)
    engine.link.send(Message("rewards", {"r1": 1.0, "r2": -1.0}))
    engine.until(lambda: service.counts["rewards"] == 2)
    assert service.trainer.buffer.newest == 3
    engine.policy = 4
    engine.until(lambda: [m for m in engine.others if m.kind == "refresh"])
    inner = service.trainer.drafter.head  # type: ignore[attr-defined]
    weights = {
        "embed": torch.full_like(inner.embed_tokens.weight, 0.5),
        "norm": torch.full_like(inner.verifier_norm.weight, 0.25),
        "lm_head": torch.full_like(inner.verifier_lm_head.weight, 0.125),
    }
    from drafter_online.target import pieces

    for message in pieces(weights, "engine", 4):
        assert engine.link.send(message)
    engine.until(lambda: service.counts["refreshed"] == 1)
    assert float(inner.embed_tokens.weight[0, 0]) == 0.5 and float(inner.lm_head.weight[0, 0]) == 0.125
    assert service.parts.policy == 4


def test_one_update_of_the_drafter_for_several_of_the_policy(services: Services, tiny_target: Path) -> None:
    service = services(passes=1e6, publish_every=2, recency=0, training={**TRAINING, "update_interval": 2})
    engine = FakeEngine(service)
    engine.policy = 1
    engine.until(lambda: service.engines.policy == 1)
    feed(engine, tiny_target, 8, target_version=1)
    for policy, published in ((1, 1), (2, 1), (3, 2), (4, 2), (5, 3)):
        engine.policy = policy
        engine.until(lambda p=policy, n=published: service.engines.policy == p and service.counts["published"] >= n)
        for _ in range(20):
            engine.turn()
        steps = service.trainer.counts.steps
        engine.turn(0.2)
        assert service.trainer.counts.steps == steps, "it trains while it waits"
        assert service.counts["published"] == published


def test_a_full_disk_costs_versions_and_nothing_else(services: Services, tiny_target: Path, monkeypatch: Any) -> None:
    from drafter_online import files, versions

    service = services(passes=1000.0, save_seconds=0.2)
    engine = FakeEngine(service)
    real = versions.write_synced

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    for module in (versions, files):  # buffer and checkpoints write by the last
        monkeypatch.setattr(module, "write_synced", full)
    feed(engine, tiny_target)
    engine.until(lambda: (service.tick(), {"store", "checkpoint", "buffer"} <= {a.kind for a in service.alarms})[1])
    assert service.trains and service.healthy() == (True, "ok")
    steps = service.trainer.counts.steps
    engine.until(lambda: service.trainer.counts.steps > steps)
    assert status(service)["versions"]["failed"] >= 1 and not engine.offers
    for module in (versions, files):
        monkeypatch.setattr(module, "write_synced", real)
    engine.until(lambda: engine.version)
    engine.until(lambda: (service.tick(), not list(service.alarms))[1])


def test_a_deleted_store_begins_again_above_what_engines_run(services: Services, tiny_target: Path) -> None:
    service = services(passes=1000.0)
    engine = FakeEngine(service)
    feed(engine, tiny_target)
    engine.version = 40
    engine.until(lambda: engine.version > 40)
    # At once: the daemon may be writing to it, and a folder that is being emptied would not be empty at the end.
    (service.config.dir / "versions").rename(service.config.dir / "deleted")
    before = engine.version
    engine.until(lambda: engine.version > before)


def test_steps_that_fail_are_an_alarm_and_are_tried_again(
    services: Services, tiny_target: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("drafter_online.service.BACK_OFF", (0.05, 0.1))
    service = services()
    step = service.trainer.micro_step

    def broken(*args: Any) -> Any:
        raise RuntimeError("planted")

    service.trainer.micro_step = broken  # type: ignore[method-assign]
    engine = FakeEngine(service)
    feed(engine, tiny_target)
    engine.until(lambda: service.counts["failed_steps"] >= 2)
    assert any("planted" in a.text for a in service.alarms) and service.trains
    service.trainer.micro_step = step  # type: ignore[method-assign]
    engine.until(lambda: engine.version)
    assert not list(service.alarms)


def test_a_step_that_hangs_is_unhealthy_and_engines_learn_of_it(
    services: Services,
    tiny_target: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("drafter_online.idle.LEAST_SECONDS", 0.3)
    monkeypatch.setattr("drafter_online.idle.TIMES", 0.0)
    service = services(job=True)
    engine = FakeEngine(service)
    release = threading.Event()
    step = service.trainer.micro_step
    monkeypatch.setattr(service.trainer, "micro_step", lambda interrupt: release.wait(30) and step(interrupt))
    feed(engine, tiny_target)
    engine.until(lambda: not service.healthy()[0])
    assert "a training step of the drafter has been running for" in service.healthy()[1]
    service.tick()
    assert [a.kind for a in service.alarms] == ["hang"] and caplog.text.count("has been running for") == 1
    assert status(service)["training"]["step_age_seconds"] > 0.2 and status(service)["training"]["hangs"]
    engine.until(lambda: any(m.kind == "status" and m.body["hangs"] for m in engine.others))
    assert "does not answer" in checkpoint(engine, "save", tmp_path / "late")["error"], (
        "a checkpoint does not wait for it"
    )
    monkeypatch.setattr("drafter_online.idle.LEAST_SECONDS", 120.0)
    release.set()
    engine.until(lambda: service.healthy()[0] and service.trainer.counts.steps > 0)
    service.tick()
    assert not list(service.alarms) and caplog.text.count("has been running for") == 1


def test_domains_are_counted_and_bounded(services: Services) -> None:
    service = services()
    engine = FakeEngine(service)
    engine.domains = {"code": [1, 10, 8, 30, 20, 30], "prose": [1, 10, 5, 10, 1, 11]}
    engine.until(lambda: list(service.engines))
    engine.domains = {"code": [3, 30, 20, 60, 50, 80], "prose": [2, 20, 5, 10, 1, 21]}
    engine.until(lambda: service.engines.domains.get("prose"))
    shown = status(service)["domains"]
    assert {n: d["length"] for n, d in shown.items()} == {"code": 2.5, "prose": 1.0} and shown["code"]["rate"] == 1.0
    engine.domains = {f"d{i}": [1, 1, 0, 0, 0, 1] for i in range(300)}
    engine.until(lambda: len(service.engines.domains) >= 64)
    assert len(service.engines.domains) <= 65
    # An engine that began anew counts from nothing.
    before = service.engines.total().requests
    engine.domains = {"code": [1, 1, 0, 0, 0, 1]}
    engine.until(lambda: service.engines.total().requests == before + 1)


def test_it_ends_when_no_engine_is_connected_for_long(services: Services) -> None:
    service = services(linger=0.1)
    assert "no engine" in service.run(threading.Event())


def test_what_was_learned_while_a_version_was_on_canary_is_published_after_it(
    services: Services, tiny_target: Path
) -> None:
    service = services(passes=32.0)
    engine = FakeEngine(service, verdict="silent")
    feed(engine, tiny_target)
    engine.until(lambda: engine.offers and service.training == "waiting for new feedback")
    assert service.trainer.counts.steps >= 30 and service.versions.numbers() == [1], "the second is due, and waits"
    engine.verdicts.append([1, "promoted", "because"])
    engine.version, engine.verdict = 1, "promoted"
    engine.until(lambda: engine.version == 2)
    assert service.training == "waiting for new feedback"
