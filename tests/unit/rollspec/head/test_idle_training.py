"""The training thread without an engine: when it trains, what it publishes, what it keeps."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_like import like

torch = pytest.importorskip("torch")

from idle_engine import RUNNER, Trainings, steps, still, until  # noqa: E402

from drafter_online.versions import Versions  # noqa: E402
from rollspec import RollspecConfig  # noqa: E402
from rollspec.head import idle  # noqa: E402
from rollspec.head.training import HeadTraining  # noqa: E402


def test_it_trains_while_nothing_runs_and_offers_versions(training: Trainings) -> None:
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
    e.head.asleep = True
    assert still(e.t)
    e.head.asleep = False
    before = steps(e.t)
    assert until(lambda: steps(e.t) > before)


def test_rounds_are_trained_where_they_pay(training: Trainings) -> None:
    e = training(**{"drafter.train_when": "pays"})
    assert still(e.t) and steps(e.t) == 0, "no feedback, no training"
    e.t.observed([[1, 2], [], [3]])
    assert until(lambda: steps(e.t) == 20) and still(e.t), "one round of publish_every steps"
    assert e.t.when.rounds == 1 and e.t.when.cost > 0 and until(lambda: len(e.offered) == 1)


def test_the_newest_state_is_offered_when_a_canary_ends(training: Trainings) -> None:
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
        "rollspec.engine.vllm.v2.speculator_run:SpeculatorRun",
        draft_model_config=like("vllm.config:ModelConfig", model=str(folder)),
    )
    runner = like(RUNNER, device=torch.device("cpu"))
    vllm_config = like("vllm.config:VllmConfig", model_config=like("vllm.config:ModelConfig", model=str(tiny_target)))
    t = SimpleNamespace(
        head=SimpleNamespace(bridge=bridge, drafter=drafter, runner=runner, vllm_config=vllm_config),
        config=config.drafter,
        folder=tmp_path,
    )
    idle.IdleTraining._make(t)  # type: ignore[arg-type]
    keep, trainer = t._trainer.buffer.config, t._trainer
    assert (keep.half_life, keep.keep_versions, keep.max_bytes) == (4.0, None, 1 << 20)
    assert trainer.config.divergence == "lk_hybrid" and trainer.config.batch_tokens == 96


def test_a_draft_model_is_trained_and_follows_the_targets_weights(tiny_target: Path, tmp_path: Path) -> None:
    pytest.importorskip("speculators")
    from drafter_online.model import DraftModel

    given = {"proposal.drafters": ["draft_model"], "proposal.learned.model": str(tiny_target), "drafter.mode": "idle"}
    bridge = SimpleNamespace(config=RollspecConfig.load(given, env={}), engine=SimpleNamespace(version=3))
    drafter = like(
        "rollspec.engine.vllm.v2.speculator_run:SpeculatorRun",
        draft_model_config=like("vllm.config:ModelConfig", model=str(tiny_target)),
    )
    vllm_config = like("vllm.config:VllmConfig", model_config=like("vllm.config:ModelConfig", model=str(tiny_target)))
    runner = like(RUNNER, device=torch.device("cpu"))
    head = SimpleNamespace(bridge=bridge, drafter=drafter, runner=runner, vllm_config=vllm_config, asleep=False)
    head.reading = threading.Lock()
    t: Any = SimpleNamespace(head=head, config=bridge.config.drafter, folder=tmp_path, _version=-1)
    idle.IdleTraining._make(t)
    made = t._trainer.drafter
    assert isinstance(made, DraftModel) and t._trainer.steps == 1
    states = torch.randn(3, made.hidden)
    before = made.targets(states)
    new = {"norm": made._norm.clone(), "lm_head": 2 * made._lm_head}
    head.ranks, t.parts = SimpleNamespace(alone=True), None
    head.runner = like(RUNNER, model_config=SimpleNamespace(get_vocab_size=lambda: len(new["lm_head"])))
    t._target = lambda: HeadTraining._target(t)
    # vLLM is loading weights: a layer that has not all of its own yet has none.
    head.target_parts = lambda: {**new, "lm_head": new["lm_head"].to("meta")}
    idle.IdleTraining._refresh(t)
    torch.testing.assert_close(made.targets(states), before)
    head.target_parts = lambda: new
    idle.IdleTraining._refresh(t)
    torch.testing.assert_close(made.targets(states), 2 * before)


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
        info |= {"steps": 5, "tokens": 100, "wasted_seconds": 0.5, "idle_seconds": 9.0, "used_seconds": 8.0}
        info |= {"preempted": 1, "preempt_seconds": 0.2, "preempt_p99_seconds": 0.1, "micro_step_seconds": 0.3}
    training = SimpleNamespace(info=lambda: info, resumed=(3, 60))
    deployment = SimpleNamespace(pauses=[], running=SimpleNamespace(number=0, since=0))
    drafts = SimpleNamespace(
        caught_up=0, rebuilt=0, swapper=SimpleNamespace(counts={}, deployment=deployment), capture=None,
        training=training, _drained={}, policy_version=0, engine=SimpleNamespace(head=SimpleNamespace(reached=None)),
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


def test_rewards_and_state(training: Trainings, tmp_path: Path) -> None:
    e = training()
    e.t.reward([("p", "r", 1.0)])
    assert until(lambda: e.t._trainer is not None and e.t._trainer.rewards == {"p:r": 1.0})
    assert until(lambda: len(e.offered) >= 1)
    Versions(e.t.folder / "versions").record(1, "promoted")
    assert e.t.save(tmp_path / "checkpoint")
    again = training("another", asleep=True)  # it does not begin
    assert again.t.load(tmp_path / "checkpoint")
    assert [p.name for p in again.offered] == ["00000001"]
    again.head.asleep = False
    assert until(lambda: steps(again.t) > 0)
    assert not again.t.load(tmp_path / "checkpoint"), "it has begun here"
    assert not again.t.load(tmp_path / "nothing")


def test_the_targets_weights_are_not_read_while_the_engine_sleeps() -> None:
    taken: list[int] = []
    head = SimpleNamespace(
        asleep=True, reading=threading.Lock(), bridge=SimpleNamespace(engine=SimpleNamespace(version=3))
    )
    trainer = SimpleNamespace(
        drafter=SimpleNamespace(refresh=lambda *given: None), buffer=SimpleNamespace(token_counts=dict)
    )
    t: Any = SimpleNamespace(head=head, _trainer=trainer, _version=-1, _target=lambda: taken.append(1) or {})
    idle.IdleTraining._refresh(t)
    assert not taken and t._version == -1, "they are taken when it is awake"
    head.asleep = False
    idle.IdleTraining._refresh(t)
    idle.IdleTraining._refresh(t)
    assert taken == [1] and t._version == 3
    idle.IdleTraining._refresh(t)
    assert taken == [1]
    idle.IdleTraining._refresh(t, again=True)
    assert taken == [1, 1], "before a version is published"
