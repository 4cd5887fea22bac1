"""The training thread without an engine: when it trains, what it publishes, what it keeps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_like import like

torch = pytest.importorskip("torch")

from drafter_online.idle import Idle  # noqa: E402
from drafter_online.versions import Versions  # noqa: E402
from rollspec import RollspecConfig  # noqa: E402
from rollspec.head import idle  # noqa: E402

RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"


class Buffer:
    def __init__(self, rewards: dict[str, float]) -> None:
        self.reward = rewards.update

    def __len__(self) -> int:
        return 1

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)


class Trainer:
    """Counts steps instead of making them."""

    def __init__(self, folder: Path) -> None:
        self.counts = SimpleNamespace(steps=0, tokens=0, preempted=0)
        self.last_loss = 1.0
        self.rewards: dict[str, float] = {}
        self.buffer = Buffer(self.rewards)
        self.checkpoints = SimpleNamespace(wait=lambda: None)
        self.fail = False
        self.published: list[int] = []  # steps so far

    def micro_step(self, interrupt: Callable[[], bool]) -> Any:
        if self.fail:
            raise RuntimeError("planted")
        if interrupt():
            return SimpleNamespace(skipped="preempted")
        time.sleep(0.001)
        self.counts.steps += 1
        return SimpleNamespace(
            skipped=None, terms={"accept_0": 2.0, "loss": 1.0}, acceptance=SimpleNamespace(rates=[0.5], length=1.5)
        )

    def checkpoint(self) -> None:
        pass

    def publish(self, store: Versions, dtype: Any) -> int:
        self.published.append(self.counts.steps)
        return store.publish({"w": torch.ones(1)}, {}, base="b", target_version=0)


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = []

    def make(self: Any) -> None:
        self._idle, self._trainer = Idle(settle_seconds=0.0), Trainer(tmp_path)

    monkeypatch.setattr(idle.IdleTraining, "_make", make)
    monkeypatch.setattr(idle.IdleTraining, "_refresh", lambda self, again=False: None)
    monkeypatch.setattr(idle, "add_all", lambda buffer, samples: [])

    def build(name: str = "job", **more: Any) -> Any:
        given = {"proposal.drafters": ["eagle3"], "drafter.mode": "idle", "drafter.publish_every": 20}
        given["drafter.dir"] = str(tmp_path / name)
        given |= more
        config = RollspecConfig.load(given, env={})
        offered: list[Path] = []
        swapper = SimpleNamespace(open=True, canary=None, offer=lambda folder, canary=True: offered.append(folder))
        faults: dict[str, int] = {}
        bridge = SimpleNamespace(config=config, faults=faults, proposer=SimpleNamespace(version=0))
        bridge.count = lambda cause: faults.update({cause: faults.get(cause, 0) + 1})
        learned = SimpleNamespace(
            asleep=False,
            bridge=bridge,
            capture=SimpleNamespace(ready=True, take=lambda n: []),
            swapper=swapper,
            runner=like(RUNNER, device=torch.device("cpu"), dtype=torch.float32),
        )
        t = idle.IdleTraining(learned)  # type: ignore[arg-type]
        made.append(t)
        return SimpleNamespace(t=t, offered=offered, learned=learned, swapper=swapper, faults=faults)

    yield build
    for t in made:
        t.stop()
        t._thread.join(5)


def steps(t: Any) -> int:
    return t._trainer.counts.steps if t._trainer is not None else 0


def until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 30.0
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.005)
    return False


def still(t: Any) -> bool:
    """No step is made any more."""
    time.sleep(0.15)
    before = steps(t)
    time.sleep(0.2)
    return steps(t) == before


def test_it_trains_while_nothing_runs_and_offers_versions(training: Any) -> None:
    e = training()
    assert until(lambda: len(e.offered) >= 2)
    assert e.offered[0] != e.offered[1] and all((p / "manifest.json").is_file() for p in e.offered)
    e.t.step_begins()
    assert still(e.t), "a step is being computed"
    e.t.step_ended()
    before = steps(e.t)
    assert until(lambda: steps(e.t) > before)
    e.t.updating = True
    assert still(e.t)
    e.t.step_begins()  # the engine has the machine back
    e.t.step_ended()
    assert not e.t.updating
    e.learned.asleep = True
    assert still(e.t)
    e.learned.asleep = False
    before = steps(e.t)
    assert until(lambda: steps(e.t) > before)


def test_the_newest_state_is_offered_when_a_canary_ends(training: Any) -> None:
    e = training(**{"drafter.publish_every": 100})
    assert until(lambda: len(e.offered) >= 1)
    e.swapper.open = False
    time.sleep(0.1)
    count, before = len(e.offered), steps(e.t)
    assert until(lambda: steps(e.t) >= before + 150), "training continues during a canary"
    assert len(e.offered) == count, "a version on canary is waited for"
    e.t.updating = True
    assert still(e.t)
    e.swapper.open = True
    time.sleep(0.2)
    assert len(e.offered) == count, "the machine is not the trainer's"
    last = steps(e.t)
    e.t._trainer.micro_step = lambda interrupt: SimpleNamespace(skipped="nothing to train on")
    e.t.updating = False
    assert until(lambda: len(e.offered) == count + 1) and steps(e.t) == last, "not only at the next multiple"
    time.sleep(0.2)
    assert len(e.offered) == count + 1, "and once"


def test_the_trainer_is_made_as_the_job_says(tiny_target: Path, tmp_path: Path) -> None:
    pytest.importorskip("speculators")
    from drafter_target import head

    from drafter_online import head as heads

    folder = heads.save(head(tiny_target, draft_vocab_size=16, counts={i: 1 for i in range(16)}), tmp_path / "head")
    config = RollspecConfig.load(
        {
            "mode": "coupled",
            "proposal.drafters": ["eagle3"],
            "drafter.mode": "idle",
            "drafter.buffer_bytes": 1 << 20,
            "drafter.training": {"recipe": "matched", "batch_tokens": 96},
        },
        env={},
    )
    bridge = SimpleNamespace(config=config)
    drafter = like(
        "rollspec.engine.vllm.v2.drafter:Drafter",
        draft_model_config=like("vllm.config:ModelConfig", model=str(folder)),
    )
    runner = like(RUNNER, device=torch.device("cpu"))
    vllm_config = like("vllm.config:VllmConfig", model_config=like("vllm.config:ModelConfig", model=str(tiny_target)))
    t = SimpleNamespace(
        learned=SimpleNamespace(bridge=bridge, drafter=drafter, runner=runner, vllm_config=vllm_config),
        config=config.drafter,
        folder=tmp_path,
    )
    idle.IdleTraining._make(t)  # type: ignore[arg-type]
    keep, trainer = t._trainer.buffer.config, t._trainer
    assert (keep.half_life, keep.keep_versions, keep.max_bytes) == (4.0, None, 1 << 20)
    assert trainer.config.divergence == "lk_hybrid" and trainer.config.batch_tokens == 96


@pytest.mark.parametrize("mode", ["idle", "dedicated"])
def test_what_is_reported_of_training(mode: str) -> None:
    from rollspec.head.draft_head import DraftHead
    from rollspec.telemetry.engine_stats import EngineStats
    from rollspec.telemetry.metrics import find, to_metrics

    info: dict[str, Any] = {
        "loss": 2.5, "terms": {"accept_0": 2.0, "rejected": 1.0}, "length": 1.5, "samples": 7, "step_age_seconds": 0.0,
        "hangs": None,
    }  # fmt: skip
    if mode == "idle":
        info |= {"steps": 5, "tokens": 100, "wasted_seconds": 0.5, "idle_seconds": 9.0, "harvested_seconds": 8.0}
        info |= {"preempted": 1, "preempt_seconds": 0.2, "preempt_p99_seconds": 0.1, "micro_step_seconds": 0.3}
    training = SimpleNamespace(info=lambda: info, resumed=(3, 60))
    drafts = SimpleNamespace(
        caught_up=0, rebuilt=0, swapper=None, capture=None, training=training, _drained={},
        proposer=SimpleNamespace(reached=None),
    )  # fmt: skip
    sums, levels = DraftHead.drain(drafts)  # type: ignore[arg-type]
    metrics = to_metrics(EngineStats(drafter=sums, drafter_levels=levels))
    got = {n.removeprefix("rollspec/drafter/"): v for n, v in metrics.items() if "/drafter/" in n}
    assert all(find(n) is not None for n in metrics)
    assert (got["loss"], got["loss/accept_0"], got["loss/rejected"], got["step_age_seconds"]) == (2.5, 2.0, 1.0, 0.0)
    if mode == "idle":
        assert (got["wasted_seconds"], got["preempt_p99_seconds"], got["micro_step_seconds"]) == (0.5, 0.1, 0.3)
        assert got["train_steps"] == 2
    else:
        assert "train_steps" not in got, "the daemon's steps are no replica's"


def test_rewards_and_state(training: Any, tmp_path: Path) -> None:
    e = training()
    e.t.reward([("p", "r", 1.0)])
    assert until(lambda: e.t._trainer is not None and e.t._trainer.rewards == {"p:r": 1.0})
    assert until(lambda: len(e.offered) >= 1)
    Versions(e.t.folder / "versions").record(1, "promoted")
    assert e.t.save(tmp_path / "checkpoint")
    again = training("another")
    again.t.updating = True  # it has not begun
    if again.t._trainer is None:
        assert again.t.load(tmp_path / "checkpoint")
        assert [p.name for p in again.offered] == ["00000001"]
    assert not again.t.load(tmp_path / "nothing")


def test_a_fault_ends_the_training_and_nothing_else(training: Any, caplog: pytest.LogCaptureFixture) -> None:
    e = training()
    assert until(lambda: steps(e.t) > 0)
    e.learned.capture.take = None  # a fault in the thread itself
    assert until(lambda: e.t.error is not None)
    assert any("drafter training" in cause for cause in e.learned.bridge.faults)
    assert threading.main_thread().is_alive() and until(lambda: "not trained from now on" in caplog.text)
    assert e.t.info()["error"]


def test_a_store_that_is_full_or_gone_is_tried_again(
    training: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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
    training: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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
    training: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    training: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    e = training()
    assert until(lambda: steps(e.t) > 0)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(idle.shutil, "copytree", full)
    assert not e.t.save(tmp_path / "checkpoint")
    before = steps(e.t)
    assert until(lambda: steps(e.t) > before) and e.t.error is None


def test_an_engine_that_died_in_a_canary_starts_with_what_was_promoted(training: Any, tmp_path: Path) -> None:
    store = Versions(tmp_path / "job" / "drafter" / "versions")
    for _ in range(2):
        store.publish({"w": torch.ones(1)}, {}, base="b", target_version=0)
    store.record(1, "promoted")  # version 2 was on canary: it has no verdict
    e = training()
    assert [p.name for p in e.offered] == ["00000001"]
    assert until(lambda: len(e.offered) >= 2) and int(e.offered[1].name) == 3, "numbers go on above both"


def test_versions_for_several_engines_are_published_and_left_to_the_follower(training: Any, tmp_path: Path) -> None:
    store = Versions(tmp_path / "shared")
    store.record(1, "promoted", "by another engine")
    e = training(**{"drafter.versions": str(store.folder)})
    assert until(lambda: len(store.numbers()) >= 2)
    assert e.offered == [] and not (e.t.folder / "versions").exists()


def test_of_engines_that_share_a_store_one_trains_and_the_next_one_takes_over(
    training: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle, "LOOK_SECONDS", 0.0)
    store = Versions(tmp_path / "shared")
    shared = {"drafter.versions": str(store.folder)}
    first = training("one", **shared)
    assert until(lambda: steps(first.t) > 0)
    second = training("two", **shared)
    time.sleep(0.2)
    assert second.t._trainer is None and second.learned.capture.paused and not second.faults
    assert not first.learned.capture.paused, "who trains records"
    first.t.stop()
    assert until(lambda: steps(second.t) > 0) and not second.learned.capture.paused


def test_who_takes_over_goes_on_from_the_newest_good_version(training: Any, tmp_path: Path) -> None:
    store = Versions(tmp_path / "shared")
    e = training(**{"drafter.versions": str(store.folder), "drafter.publish_every": 10**6})
    assert e.t._taken_over() is None
    for _ in range(3):
        store.publish({"w": torch.ones(1)}, {}, base="b", target_version=0)
    store.record(3, "rolled_back")
    assert e.t._taken_over() == 2
    (store.path(2) / "manifest.json").write_text("{")
    assert e.t._taken_over() is None
    ((cause, times),) = e.faults.items()
    assert "taking over" in cause and "damaged" in cause and times == 1


def test_the_targets_weights_are_not_read_while_the_engine_sleeps() -> None:
    taken: list[int] = []
    learned = SimpleNamespace(
        asleep=True, reading=threading.Lock(), bridge=SimpleNamespace(proposer=SimpleNamespace(version=3))
    )
    t: Any = SimpleNamespace(learned=learned, _version=-1, _target=lambda: taken.append(1))
    idle.IdleTraining._refresh(t)
    assert not taken and t._version == -1, "they are taken when it is awake"
    learned.asleep = False
    idle.IdleTraining._refresh(t)
    idle.IdleTraining._refresh(t)
    assert taken == [1] and t._version == 3
    idle.IdleTraining._refresh(t)
    assert taken == [1]
    idle.IdleTraining._refresh(t, again=True)
    assert taken == [1, 1], "before a version is published"
