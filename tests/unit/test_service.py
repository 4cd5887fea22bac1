"""The daemon with a tiny real head: it learns from what engines send, publishes, survives, and comes back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("speculators")
pytest.importorskip("fastapi")

from drafter_target import head, sample  # noqa: E402
from fake_engine import FakeEngine  # noqa: E402

from drafter_online import architecture  # noqa: E402
from drafter_online import head as heads  # noqa: E402
from drafter_online.buffer import Buffer  # noqa: E402
from drafter_online.errors import DrafterError, VersionError  # noqa: E402
from drafter_online.service import Service  # noqa: E402
from drafter_online.settings import settings  # noqa: E402
from drafter_online.status import list_versions, status  # noqa: E402
from drafter_online.versions import Versions  # noqa: E402
from drafter_online.wire import Message  # noqa: E402

TRAINING = {"batch_tokens": 96, "window_tokens": 48, "warmup_steps": 2, "learning_rate": 3e-3, "checkpoint_every": 10}
Make = Callable[..., Service]


@pytest.fixture(scope="module")
def given_head(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return heads.save(head(tiny_target), tmp_path_factory.mktemp("head"), torch.float32)


@pytest.fixture
def make(tiny_target: Path, given_head: Path, tmp_path: Path) -> Iterator[Make]:
    open_: list[Service] = []

    def build(folder: str = "daemon", **kw: Any) -> Service:
        given: dict[str, Any] = {
            "dir": tmp_path / folder, "target": str(tiny_target), "head": given_head, "endpoint": "tcp://127.0.0.1:0",
            "publish_every": 15, "training": TRAINING, "dtype": "float32", **kw,
        }  # fmt: skip
        service = Service(settings(given))
        open_.append(service)
        service.start()
        return service

    yield build
    for service in open_:
        with_suppressed_close(service)


def with_suppressed_close(service: Service) -> None:
    if not service._stop.is_set():
        service.close()


def feed(engine: FakeEngine, target: Path, n: int = 8, start: int = 0, **fields: Any) -> None:
    engine.until(lambda: engine.link.ready)
    for i in range(n):
        assert engine.send(sample(target, start + i, **fields))


def test_an_engine_feeds_it_and_gets_versions(make: Make, tiny_target: Path) -> None:
    service = make()
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
    until(lambda: not len(service.hub))


def test_training_waits_for_new_feedback(make: Make, tiny_target: Path) -> None:
    service = make(passes=2.0)
    engine = FakeEngine(service)
    feed(engine, tiny_target, 4)
    engine.until(lambda: service.training == "waiting for new feedback")
    steps = service.trainer.counts.steps
    time.sleep(0.5)
    assert service.trainer.counts.steps == steps and steps <= 4
    feed(engine, tiny_target, 4, 10)
    engine.until(lambda: service.trainer.counts.steps > steps)


def test_one_engine_tries_a_version_and_the_others_follow(make: Make, tiny_target: Path) -> None:
    service = make(passes=20.0)
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


def test_what_an_engine_takes_back_is_rolled_back_and_an_alarm(make: Make, tiny_target: Path) -> None:
    service = make(passes=1000.0)
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


def test_a_canary_without_a_verdict_is_given_to_one_more(make: Make, tiny_target: Path) -> None:
    service = make(patience=0.5)
    first, second = FakeEngine(service, "first", "silent"), FakeEngine(service, "second")
    feed(first, tiny_target)
    first.until(lambda: first.offers)
    second.until(lambda: second.version)


def test_promote_and_roll_back_by_hand(make: Make, tiny_target: Path) -> None:
    service = make()
    engine = FakeEngine(service)
    feed(engine, tiny_target)
    engine.until(lambda: engine.version >= 2)
    service._stop.set()  # no more training
    service._thread.join()
    engine.until(lambda: service.release.current == engine.version and not service.release.pending)
    bad, good = engine.version, service.release.current
    old = min(n for n in service.versions.numbers())
    answer = service.promote(old)
    assert answer["runs_as"] > bad
    engine.until(lambda: engine.version == answer["runs_as"])
    same = [service.versions.load(n).tensors for n in (old, engine.version)]
    assert all(torch.equal(t, same[1][n]) for n, t in same[0].items())
    assert engine.offers[-1]["canary"] is False
    back = service.rollback(engine.version)
    engine.until(lambda: engine.version == back["runs_as"])
    copy = service.versions.manifest(back["runs_as"])
    assert copy.provenance["copy_of"] == good
    rows = list_versions(service.versions, service.release.current)
    assert rows[-1]["promoted"] and rows[-1]["copy_of"] == good
    with pytest.raises(VersionError, match="not in the store"):
        service.rollback(99999)
    with pytest.raises(VersionError, match="not in"):
        service.promote(99999)
    service.hub.close()
    os.close(service._lock_file)


def test_rolling_the_first_version_back_brings_the_first_head(make: Make, tiny_target: Path, given_head: Path) -> None:
    service = make(passes=2.0, publish_every=4)
    engine = FakeEngine(service)
    feed(engine, tiny_target, 8)
    engine.until(lambda: engine.version)
    engine.until(lambda: service.training != "running" and not service.release.pending)
    for event in service.versions.events()[:-1]:
        service.versions.record(event.version, "rolled_back")
    answer = service.rollback(engine.version)
    engine.until(lambda: engine.version == answer["runs_as"])
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
def test_samples_that_do_not_fit_are_refused(make: Make, tiny_target: Path, change: dict[str, Any]) -> None:
    service = make()
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


def test_engines_of_other_targets_are_refused_in_one_sentence(make: Make) -> None:
    service = make()
    for hello, word in (({"base": "another"}, "'another'"), ({"aux": [1, 2, 4]}, "layers")):
        engine = FakeEngine(service, **hello)
        engine.until(lambda e=engine: e.link.away != "it has not answered yet")
        assert word in str(engine.link.away) and not engine.link.ready
    assert not list(service.engines)


def test_rewards_and_the_moving_target_reach_the_training(make: Make, tiny_target: Path) -> None:
    service = make(recency=0)
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


def test_a_full_disk_costs_versions_and_nothing_else(make: Make, tiny_target: Path, monkeypatch: Any) -> None:
    from drafter_online import checkpoint, files, versions

    service = make(passes=1000.0, save_seconds=0.2)
    engine = FakeEngine(service)
    real = versions.write_synced

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    for module in (versions, checkpoint, files):  # the buffer writes by the last
        monkeypatch.setattr(module, "write_synced", full)
    feed(engine, tiny_target)
    engine.until(lambda: (service.tick(), {"store", "checkpoint", "buffer"} <= {a.kind for a in service.alarms})[1])
    assert service.trains and service.healthy() == (True, "ok")
    steps = service.trainer.counts.steps
    engine.until(lambda: service.trainer.counts.steps > steps)
    assert status(service)["versions"]["failed"] >= 1 and not engine.offers
    for module in (versions, checkpoint, files):
        monkeypatch.setattr(module, "write_synced", real)
    engine.until(lambda: engine.version)
    engine.until(lambda: (service.tick(), not list(service.alarms))[1])


def test_a_deleted_store_begins_again_above_what_engines_run(make: Make, tiny_target: Path) -> None:
    import shutil

    service = make(passes=1000.0)
    engine = FakeEngine(service)
    feed(engine, tiny_target)
    engine.version = 40
    engine.until(lambda: engine.version > 40)
    shutil.rmtree(service.config.dir / "versions")
    before = engine.version
    engine.until(lambda: engine.version > before)


def test_steps_that_fail_are_an_alarm_and_are_tried_again(make: Make, tiny_target: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("drafter_online.service.BACK_OFF", (0.05, 0.1))
    service = make()
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


def test_a_step_that_hangs_is_unhealthy_and_engines_are_told(
    make: Make, tiny_target: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("drafter_online.idle.LEAST_SECONDS", 0.3)
    monkeypatch.setattr("drafter_online.idle.TIMES", 0.0)
    service = make(job=True)
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
    assert "does not answer" in errand(engine, "save", tmp_path / "late")["error"], "a checkpoint does not wait for it"
    monkeypatch.setattr("drafter_online.idle.LEAST_SECONDS", 120.0)
    release.set()
    engine.until(lambda: service.healthy()[0] and service.trainer.counts.steps > 0)
    service.tick()
    assert not service.alarms.to_list() and caplog.text.count("has been running for") == 1


# ---- checkpoints of a job -------------------------------------------------------------------------------------------


def errand(engine: FakeEngine, kind: Any, folder: Path | str) -> dict[str, Any]:
    number = len(engine.others) + 1
    assert engine.link.send(Message(kind, {"id": number, "folder": str(folder)}))
    found: Message = engine.until(
        lambda: next((m for m in engine.others if m.kind == "done" and m.body["id"] == number), None)
    )
    return found.body


def replica(folder: Path, i: int) -> Path:
    path = folder / f"replica_{i}" / "drafter"
    path.mkdir(parents=True, exist_ok=True)
    return path


def settled(service: Service, engine: FakeEngine) -> int:
    """Steps, once what came has been learned and the training waits for more; the engine's link is looked after."""
    engine.until(lambda: service.trainer.counts.steps and service.training == "waiting for new feedback")
    return service.trainer.counts.steps


def test_its_state_goes_into_the_jobs_checkpoint_and_comes_back(make: Make, tiny_target: Path, tmp_path: Path) -> None:
    service = make(job=True, recency=0, passes=20, training={**TRAINING, "seed": 3})
    engine = FakeEngine(service)
    feed(engine, tiny_target)
    steps = settled(service, engine)
    engine.until(lambda: not service.release.pending and engine.version)
    first, second = (replica(tmp_path / "step_6" / "rollspec", i) for i in range(2))
    for folder in (first, second):
        assert errand(engine, "save", folder) | {"id": 0} == {"id": 0, "done": True, "error": None}
    held, promoted = len(service.trainer.buffer), service.release.current
    assert promoted is not None
    weights = service.versions.load(promoted).tensors
    tensors = next((first / "state").glob("step-*/state.safetensors"))
    assert os.path.samefile(tensors, second / tensors.relative_to(first)), "replicas share one copy"
    # The job goes on, and then back to its checkpoint.
    feed(engine, tiny_target, 4, 20)
    engine.until(lambda: len(service.trainer.buffer) > held)
    assert settled(service, engine) > steps
    engine.until(lambda: not service.release.pending and engine.version > promoted)
    assert errand(engine, "load", second)["done"]
    assert (service.trainer.counts.steps, len(service.trainer.buffer)) == (steps, held)
    assert (service.config.dir / "replaced" / "state").is_dir()
    before = engine.version
    engine.until(lambda: engine.version > before)  # the old weights, under a new number
    again = service.versions.load(engine.version).tensors
    assert all(torch.equal(again[n], t) for n, t in weights.items())
    # A sibling's copy is of the same state: it is not taken over again.
    feed(engine, tiny_target, 4, 40)
    engine.until(lambda: len(service.trainer.buffer) > held)
    assert errand(engine, "load", first)["done"] and len(service.trainer.buffer) > held
    settled(service, engine)
    service.close()
    # As is one that begins elsewhere.
    other = make("other", job=True, recency=0, training={**TRAINING, "seed": 3})
    engine = FakeEngine(other)
    engine.until(lambda: engine.link.ready)
    assert errand(engine, "load", first)["done"]
    assert (other.trainer.counts.steps, len(other.trainer.buffer)) == (steps, held)
    engine.until(lambda: engine.version == promoted)


def test_copies_that_cannot_be_made_are_refused_in_one_sentence(make: Make, tiny_target: Path, tmp_path: Path) -> None:
    service = make(job=True)
    engine = FakeEngine(service)
    feed(engine, tiny_target)
    settled(service, engine)
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    steps = service.trainer.counts.steps
    for kind, folder, says in (
        ("save", "here", "no absolute path"),
        ("save", tmp_path / "nowhere", "is not there for the daemon"),
        ("save", service.config.dir / "state" / "x", "a part of the daemon's own folder"),
        ("load", tmp_path / "empty", "no state of a drafter's training"),
        ("load", tmp_path / "file", "no state of a drafter's training"),
    ):
        answer = errand(engine, kind, folder)
        assert not answer["done"] and says in answer["error"] and "\n" not in answer["error"], answer
    for kind in ("save", "load"):
        assert errand(engine, kind, service.config.dir)["done"], "its own folder is a copy already"
    broken = replica(tmp_path / "broken", 0)
    assert errand(engine, "save", broken)["done"]
    for file in broken.glob("state/*/state.json"):
        file.write_text("{}")
    assert "can be read" in errand(engine, "load", broken)["error"]
    assert service.trainer.counts.steps == steps and service.healthy()[0]
    engine.send(sample(tiny_target, 77))
    engine.until(lambda: service.trainer.counts.steps > steps)
    served = make("served")
    engine = FakeEngine(served)
    engine.until(lambda: engine.link.ready)
    assert errand(engine, "save", broken) | {"id": 0} == {"id": 0, "done": False, "error": None}, "it is no job's"


def test_domains_are_counted_and_bounded(make: Make) -> None:
    service = make()
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


def test_old_samples_are_deleted(make: Make, tiny_target: Path, monkeypatch: Any) -> None:
    service = make(recency=1.0, retention_hours=1.0, passes=0.01)
    engine = FakeEngine(service)
    feed(engine, tiny_target, 3)
    engine.until(lambda: len(service.trainer.buffer) == 3)
    now = time.time()
    monkeypatch.setattr("drafter_online.service.time.time", lambda: now + 3700)
    service._save()
    assert len(service.trainer.buffer) == 0 and service.counts["expired"] == 3
    assert not list((service.config.dir / "buffer" / "samples").iterdir())


def test_what_stays_in_the_buffer_is_configured(make: Make, tiny_target: Path) -> None:
    service = make(recency=0, buffer={"keep_versions": 1, "tail_quota": 0.0}, buffer_bytes=1 << 22)
    config = service.trainer.buffer.config
    assert (config.keep_versions, config.tail_quota, config.max_bytes) == (1, 0.0, 1 << 22)
    engine = FakeEngine(service)
    feed(engine, tiny_target, 3, target_version=1)
    feed(engine, tiny_target, 2, start=5, target_version=2)
    engine.until(lambda: service.trainer.buffer.counts.added == 5)
    assert [s.target_version for s in service.trainer.buffer] == [2, 2]


def test_samples_stay_in_memory_where_that_is_wanted(make: Make, tiny_target: Path) -> None:
    service = make(keep_samples=False)
    engine = FakeEngine(service)
    feed(engine, tiny_target)
    engine.until(lambda: engine.version)
    service.close()
    assert not (service.config.dir / "buffer").exists()


def test_one_daemon_per_folder(make: Make) -> None:
    make()
    with pytest.raises(DrafterError, match=rf"in use by another daemon \(process {os.getpid()}\)"):
        make()
    with pytest.raises(DrafterError, match="needs a token"):
        make("other", endpoint="tcp://0.0.0.0:0")
    assert make("other")


def until(condition: Callable[[], Any], seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)


def test_it_ends_when_nobody_is_connected_for_long(make: Make) -> None:
    service = make(linger=0.1)
    assert "no engine" in service.run(threading.Event())


# ---- the command ----------------------------------------------------------------------------------------------------


class Daemon:
    """`drafter-online serve` as a process."""

    def __init__(self, folder: Path, target: Path, head: Path, *more: str) -> None:
        folder.mkdir(exist_ok=True)
        self.log = folder / "out.txt"
        self.endpoint = f"ipc://{folder}/wire"
        command = [
            sys.executable, "-m", "drafter_online.cli", "serve", "--target", str(target), "--dir", f"{folder}/daemon",
            "--head", str(head), "--endpoint", self.endpoint, "--port", "0", "--option", "publish_every=15",
            "--option", "save_seconds=1", "--nice", "0", "--option", "dtype=float32", *more,
        ]  # fmt: skip
        for name, value in TRAINING.items():
            command += ["--set", f"{name}={value}"]
        with open(self.log, "ab") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)

    def said(self) -> str:
        return self.log.read_text()


@pytest.fixture
def daemon(tiny_target: Path, given_head: Path, tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    started: list[Daemon] = []

    def start(*more: str) -> Daemon:
        before = (tmp_path / "d" / "out.txt").read_text().count("listening") if (tmp_path / "d").is_dir() else 0
        d = Daemon(tmp_path / "d", tiny_target, given_head, *more)
        started.append(d)
        until(lambda: d.said().count("listening") > before or d.process.poll() is not None, 90)
        return d

    yield start
    for d in started:
        if d.process.poll() is None:
            d.process.kill()
        d.process.wait()


@pytest.mark.timeout(180)
def test_killed_and_started_again_it_catches_up(
    daemon: Callable[..., Daemon],
    tiny_target: Path,
    given_head: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """kill -9 in the middle of training; a second daemon for the folder is refused; TERM saves and ends with 0."""
    monkeypatch.setattr("drafter_online.link.AWAY_SECONDS", 2.0)
    d = daemon()
    refused = invoke(["--dir", str(tmp_path / "d" / "daemon")], tiny_target, given_head, tmp_path)
    assert refused.exit_code == 2 and refused.output.strip().count("\n") == 0
    assert f"in use by another daemon (process {d.process.pid})" in refused.output
    from types import SimpleNamespace

    base = architecture.base_of(architecture.target_config(tiny_target))
    where = SimpleNamespace(hub=d, trainer=SimpleNamespace(drafter=SimpleNamespace(base=base)))
    engine = FakeEngine(where)
    feed(engine, tiny_target, 8)
    engine.until(lambda: engine.version >= 1, 60)
    engine.until(lambda: len(Buffer.load(tmp_path / "d" / "daemon" / "buffer")) == 8, 30)  # it saves once a second
    d.process.send_signal(signal.SIGKILL)
    d.process.wait()
    engine.until(lambda: engine.link.away, 20)
    version = engine.version
    d = daemon()
    feed(engine, tiny_target, 8, 20)
    engine.until(lambda: engine.version > version, 60)
    store = Versions(tmp_path / "d" / "daemon" / "versions")
    engine.until(lambda: store.promoted() == engine.version)
    d.process.send_signal(signal.SIGTERM)
    assert d.process.wait(30) == 0
    assert "all is saved" in d.said() and "Traceback" not in d.said()
    assert store.promoted() is not None
    record = json.loads(next((tmp_path / "d" / "daemon" / "state").glob("step-*/state.json")).read_text())["record"]
    assert record["counts"]["steps"] > 0
    assert len(Buffer.load(tmp_path / "d" / "daemon" / "buffer")) == 16
    engine.link.close()


@pytest.mark.timeout(120)
def test_a_daemon_that_stands_still_is_away_until_it_goes_on(
    daemon: Callable[..., Daemon], tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    monkeypatch.setattr("drafter_online.link.AWAY_SECONDS", 2.0)
    d = daemon()
    base = architecture.base_of(architecture.target_config(tiny_target))
    where = SimpleNamespace(hub=d, trainer=SimpleNamespace(drafter=SimpleNamespace(base=base)))
    engine = FakeEngine(where)
    feed(engine, tiny_target, 8)
    engine.until(lambda: engine.version, 60)
    d.process.send_signal(signal.SIGSTOP)
    try:
        engine.until(lambda: engine.link.away, 20)
        assert not engine.send(sample(tiny_target, 30)), "nothing waits for it"
    finally:
        d.process.send_signal(signal.SIGCONT)
    version = engine.version
    engine.until(lambda: engine.link.ready, 30)
    feed(engine, tiny_target, 8, 40)
    engine.until(lambda: engine.version > version, 60)
    engine.link.close()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--endpoint", "tcp://0.0.0.0:5765"], "needs a token"),
        (["--host", "0.0.0.0"], "needs a token"),
        (["--set", "learning_rate=-1"], "training.learning_rate = -1"),
        (["--option", "publish_evry=3"], "publish_evry"),
        (["--option", 'buffer={"half_live": 3}'], "buffer.half_live = 3"),
        (["--token-file", "/nowhere"], "cannot be read"),
        (["--target", "/nowhere"], "not a model"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    arguments: list[str], sentence: str, tiny_target: Path, given_head: Path, tmp_path: Path
) -> None:
    result = invoke(arguments, tiny_target, given_head, tmp_path)
    assert result.exit_code == 2 and sentence in result.output, result.output
    assert result.output.strip().count("\n") == 0


def invoke(arguments: list[str], target: Path, head: Path, folder: Path) -> Any:
    """`drafter-online serve` in this process, for what ends before it begins."""
    from typer.testing import CliRunner

    from drafter_online.cli import app

    base = ["serve", "--target", str(target), "--dir", str(folder / "other"), "--head", str(head), "--nice", "0"]
    before = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
    try:
        return CliRunner().invoke(app, [*base, *arguments], env={"DRAFTER_ONLINE_TOKEN": ""})
    finally:
        for s, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
            signal.signal(s, handler)


def test_the_documentation_has_every_knob_of_the_daemon() -> None:
    from drafter_online.settings import ServiceConfig

    page = (Path(__file__).parents[2] / "docs" / "service.md").read_text()
    options = {"dir", "target", "head", "endpoint", "token_file", "device", "training"}
    for name in ServiceConfig.model_fields:
        assert name in options or f"| `{name}` |" in page, name
