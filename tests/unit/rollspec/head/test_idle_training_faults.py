"""The training thread when something fails: a fault, a full store, a step that hangs, an engine that dies."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from idle_engine import Trainer, Trainings, steps, until  # noqa: E402

from drafter_online.versions import Versions  # noqa: E402
from rollspec.head import idle  # noqa: E402


def test_a_fault_ends_the_training_and_nothing_else(training: Trainings, caplog: pytest.LogCaptureFixture) -> None:
    e = training()
    assert until(lambda: steps(e.t) > 0)
    e.head.capture.take = None  # a fault in the thread itself
    assert until(lambda: e.t.error is not None)
    assert any("drafter training" in cause for cause in e.head.bridge.faults)
    assert threading.main_thread().is_alive() and until(lambda: "not trained from now on" in caplog.text)
    assert e.t.info()["error"]


def test_a_store_that_is_full_or_gone_is_tried_again(
    training: Trainings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import shutil

    from drafter_online.errors import VersionError

    e = training()
    assert until(lambda: len(e.offered) >= 1)
    publish = Trainer.publish

    def full(self: Any, store: Versions, dtype: Any) -> int:
        raise VersionError("drafter-online: a drafter version cannot be written (No space left on device).")

    monkeypatch.setattr(Trainer, "publish", full)
    assert until(lambda: any("publishing" in cause for cause in e.faults))
    assert until(lambda: sum(e.faults.values()) >= 2) and e.t.error is None, "training goes on"
    assert caplog.text.count("No space left") == 1, "said once"
    shutil.rmtree(e.t.folder / "versions")
    monkeypatch.setattr(Trainer, "publish", publish)
    count = len(e.offered)
    assert until(lambda: len(e.offered) > count and (e.offered[-1] / "manifest.json").is_file())


def test_a_step_that_hangs_is_said_once(
    training: Trainings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    e = training()
    assert until(lambda: steps(e.t) > 0 and e.t.info()["micro_step_seconds"] > 0)
    assert e.t.info()["hangs"] is None and e.t.info()["terms"] == {"accept_0": 2.0}
    release, step = threading.Event(), Trainer.micro_step
    monkeypatch.setattr(Trainer, "micro_step", lambda self, interrupt: release.wait(20) and None)
    assert until(lambda: e.t.info()["step_age_seconds"] > 0.1)
    monkeypatch.setattr("drafter_online.idle.LEAST_SECONDS", 0.1)
    monkeypatch.setattr("drafter_online.idle.TIMES", 0.0)
    assert until(lambda: e.t.info()["hangs"])
    e.t.step_begins()  # the engine goes on
    e.t.step_ended()
    assert e.t.info()["step_age_seconds"] > 0.1
    assert caplog.text.count("has been running for") == 1 and e.faults["drafter training: a step hangs"] == 1
    monkeypatch.setattr(Trainer, "micro_step", step)
    monkeypatch.setattr("drafter_online.idle.LEAST_SECONDS", 120.0)
    release.set()
    before = steps(e.t)
    assert until(lambda: steps(e.t) > before) and e.t.info()["hangs"] is None


def test_a_step_that_hangs_holds_up_neither_checkpoint_nor_engine(
    training: Trainings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle, "LOCK_SECONDS", 0.2)
    e = training()
    assert until(lambda: steps(e.t) > 0)
    release, hanging = threading.Event(), threading.Event()

    def hang(self: Any, interrupt: Any) -> None:
        hanging.set()
        release.wait(60)

    monkeypatch.setattr(Trainer, "micro_step", hang)
    assert hanging.wait(30)
    begin = time.perf_counter()
    assert not e.t.save(tmp_path / "checkpoint") and not (tmp_path / "checkpoint").exists()
    e.t.step_begins()
    e.t.step_ended()
    assert e.t.info()["steps"] > 0 and time.perf_counter() - begin < 2.0
    assert any("saving" in cause for cause in e.faults)
    monkeypatch.undo()
    release.set()
    assert until(lambda: e.t.save(tmp_path / "checkpoint"))


def test_a_checkpoint_that_cannot_take_the_state_is_left_without_it(
    training: Trainings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    e = training()
    assert until(lambda: steps(e.t) > 0)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copytree", full)
    assert not e.t.save(tmp_path / "checkpoint")
    assert not list((tmp_path / "checkpoint").iterdir()), "a part of it"
    before = steps(e.t)
    assert until(lambda: steps(e.t) > before) and e.t.error is None


def test_an_engine_that_died_in_a_canary_starts_with_what_was_promoted(training: Trainings, tmp_path: Path) -> None:
    store = Versions(tmp_path / "job" / "drafter" / "versions")
    for _ in range(2):
        store.publish({"w": torch.ones(1)}, {}, base="b", target_version=0)
    store.record(1, "promoted")  # version 2 was on canary: it has no verdict
    e = training()
    assert [p.name for p in e.offered] == ["00000001"]
    assert until(lambda: len(e.offered) >= 2) and int(e.offered[1].name) == 3, "numbers go on above both"
