"""The trainer's hooks against stand-ins for verl: what they add, and that no fault of theirs reaches the job."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from vllm_like import like, plays

from rollspec.errors import ConfigError
from rollspec.proposal.base import as_tokens
from rollspec.telemetry import health
from rollspec.telemetry.engine_stats import EngineStats

omegaconf = pytest.importorskip("omegaconf")
pytest.importorskip("verl")


METHOD = "ray.actor:ActorMethod"


class Ref:
    def __init__(self, value: Any, ready: bool = True) -> None:
        self.value, self.ready = value, ready


class ActorDiedError(Exception):
    pass


class Handle:
    """A server: `answers` maps an operation to its answer, an exception, or None for no answer at all."""

    def __init__(self, answers: dict[str, Any] | None = None, reason: Any = "") -> None:
        self.answers, self.reason, self.calls = answers or {}, reason, []
        self.rollspec_call = like(METHOD, remote=self._call)
        self.rollspec_tidy = like(METHOD, remote=lambda: self._call("tidy", {}))
        self.rollspec_lost = like(METHOD, remote=lambda: Ref(self.reason, self.reason is not None))

    def _call(self, op: str, payload: dict[str, Any]) -> Ref:
        self.calls.append((op, payload))
        answer = self.answers.get(op, {})
        return Ref(answer, answer is not None)


@pytest.fixture(autouse=True)
def ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(object_refs: Ref) -> Any:
        if isinstance(object_refs.value, Exception):
            raise object_refs.value
        return object_refs.value

    def wait(ray_waitables: list[Ref], *, num_returns: int, timeout: float) -> tuple[list[Ref], list[Ref]]:
        return [r for r in ray_waitables if r.ready], [r for r in ray_waitables if not r.ready]

    fake = like("ray", get=get, wait=wait, exceptions=like("ray.exceptions", RayActorError=ActorDiedError))
    import rollspec_verl  # noqa: F401 - with the real ray, before it is replaced

    monkeypatch.setitem(sys.modules, "ray", fake)


def agent_loops() -> Any:
    return like(
        "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopManagerTQ",
        generate_sequences=lambda prompts: prompts,
    )


def module() -> Any:
    """A stand-in for trainer_base.py, hooked."""
    from rollspec_verl import trainer as hooks

    @plays("verl.trainer.ppo.v1.replay_buffer:ReplayBuffer", "slow")
    class ReplayBuffer:
        poll_interval = 2.0
        slow = 0.0

        def _sync_metadata_from_transfer_queue(self) -> None:
            time.sleep(self.slow)

    class ReplayBufferAsync(ReplayBuffer):
        pass

    @plays("verl.trainer.ppo.v1.trainer_base:PPOTrainer")
    class PPOTrainer:
        def __init__(self, folder: Path, *handles: Handle, **rollout: Any) -> None:
            self.config = omegaconf.OmegaConf.create(
                {
                    "actor_rollout_ref": {"rollout": {"name": "vllm", "custom": {}, **rollout}},
                    "trainer": {"default_local_dir": str(folder), "resume_mode": "auto"},
                }
            )
            self.replicas = [like("verl.workers.rollout.replica:RolloutReplica", server_handle=h) for h in handles]
            self.global_steps = 0
            self.timing_raw = {"gen": 0.0}
            self.error: Exception | None = None

        def _rollout_server_managers(self) -> list[Any]:
            return [like("verl.workers.rollout.llm_server:LLMServerManager", get_replicas=lambda: self.replicas)]

        def _init_dataloader(self) -> str:
            return "loaded"

        def fit(self, agent_loop_manager: Any) -> str:
            return "fitted"

        def step(self, metrics: Any, timing_raw: Any) -> str:
            if self.error:
                raise self.error
            return "stepped"

        def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
            return batch

        def _save_checkpoint(self) -> None:
            self.__dict__.get("look", int)()

        def _consume_sync_metrics(self) -> dict[str, Any]:
            return {"theirs": 1}

    found = ModuleType("trainer_base")
    found.__dict__.update(PPOTrainer=PPOTrainer, ReplayBuffer=ReplayBuffer, ReplayBufferAsync=ReplayBufferAsync)
    hooks.install(found)
    hooks.install(found)  # a second time changes nothing
    return found


STATS = EngineStats(steps=4, requests=8, verified=4, drafted=10, accepted=5, emitted=13, version=3).to_dict()


def test_the_settings_are_resolved_before_anything_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLSPEC__HISTORY__DIR", "/data")
    trainer = module().PPOTrainer(tmp_path, custom={"rollspec": "suffix_only"})
    assert trainer._init_dataloader() == "loaded"
    sent = omegaconf.OmegaConf.to_container(trainer.config)["actor_rollout_ref"]["rollout"]["custom"]["rollspec"]
    assert (sent["preset"], sent["history"]["dir"]) == ("suffix_only", "/data")
    monkeypatch.delenv("ROLLSPEC__HISTORY__DIR")
    from rollspec_verl import trainer as hooks

    assert hooks.VerlState.of(trainer).config.to_dict() == sent
    wrong = module().PPOTrainer(tmp_path, custom={"rollspec": {"k_max": 1}})
    with pytest.raises(ConfigError, match=r"proposal\.k_max"):
        wrong._init_dataloader()


def test_metrics_are_merged_over_replicas_and_into_verls_own(tmp_path: Path) -> None:
    trainer = module().PPOTrainer(tmp_path, Handle({"stats": STATS}), Handle({"stats": STATS}))
    assert trainer.step({}, {}) == "stepped"
    out = trainer._consume_sync_metrics()
    assert out["theirs"] == 1
    assert out["rollspec/accept/drafted"] == 20 and out["rollspec/rollout/speculating"] == 1.0
    assert out["rollout/spec_accept_rate"] == 0.5 and out["rollout/spec_accept_length"] == 1 + 10 / 8
    assert out["rollspec/faults"] == 0 and out["rollspec/policy/version"] == 3
    assert "rollspec/rollout/generation_share" in out


def test_a_silent_or_dead_replica_is_counted_and_the_others_still_measured(tmp_path: Path) -> None:
    cls = module().PPOTrainer
    out = cls(tmp_path, Handle({"stats": STATS}), Handle({"stats": None}))._consume_sync_metrics()
    assert out["rollspec/accept/drafted"] == 10 and out["rollspec/faults"] == 1
    out = cls(tmp_path, Handle({"stats": ActorDiedError()}))._consume_sync_metrics()
    assert out["rollspec/faults"] == 1
    assert "rollspec/accept/drafted" not in out, "what was not measured is not zero"


def test_disabled_asks_no_server(tmp_path: Path) -> None:
    handle = Handle({"stats": STATS})
    trainer = module().PPOTrainer(tmp_path, handle, custom={"rollspec": {"enabled": False}})
    trainer._save_checkpoint()
    assert set(trainer._consume_sync_metrics()) == {"theirs", "rollspec/rollout/generation_share"}
    assert handle.calls == []


def test_another_rollout_engine_is_left_alone_with_a_sentence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = module().PPOTrainer(tmp_path, like("ray.actor:ActorHandle"), name="sglang")
    with caplog.at_level(logging.WARNING, "rollspec"):
        assert "rollspec/faults" not in trainer._consume_sync_metrics()
    assert "rollout.name=sglang" in caplog.text
    assert trainer.fit(agent_loops()) == "fitted"


def test_a_failing_hook_is_logged_once_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollspec_verl.rollouts import Rollouts

    def broken(batch: Any) -> Any:
        raise KeyError("responses")

    monkeypatch.setattr(Rollouts, "read", broken)
    trainer = module().PPOTrainer(tmp_path, Handle({"stats": STATS}))
    for _ in range(2):
        assert trainer._compute_advantage("batch", metrics={}) == "batch"
    assert capsys.readouterr().out.count("rollouts failed") == 1
    out = trainer._consume_sync_metrics()
    assert out["rollspec/faults/rollouts"] == 2
    assert trainer._consume_sync_metrics()["rollspec/faults"] == 0


def test_the_health_of_the_rollouts_reaches_verls_logger(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollspec_verl.rollouts import Rollouts

    sampled = np.log([0.5, 0.25, 0.5, 0.25])
    responses = [as_tokens([4, 5, 6, 7]), as_tokens([8, 9, 8, 9])]

    def read(batch: Any) -> Any:
        versions = [(3, 3), (3, 4)]
        return Rollouts([as_tokens([1])] * 2, responses, [0.0] * 2, [sampled] * 2, [sampled - 1] * 2, ["0_0", "1_0"],
                        versions)  # fmt: skip

    monkeypatch.setattr(Rollouts, "read", read)
    monkeypatch.setitem(health.LIMITS, "gap", 2.0)
    trainer = module().PPOTrainer(tmp_path, custom={"rollspec": {"enabled": False}}, top_p=0.9)
    trainer._compute_advantage("batch", metrics={})
    first = trainer._consume_sync_metrics()
    trainer.global_steps = 1
    trainer._compute_advantage("batch", metrics={})
    second = trainer._consume_sync_metrics()
    assert first["rollspec/health/warnings"] == 1.0 and first["rollspec/health/warnings/ratios"] == 1.0
    assert first["rollspec/health/ess_token"] == pytest.approx(1.0), "all weights are alike"
    assert "rollspec/health/epoch_overlap" not in first
    assert second["rollspec/health/epoch_overlap"] == 1.0 and second["rollspec/health/warnings"] == 2.0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("rollspec: at step")]
    assert len(said) == 2 and "top_p" in said[0] and "1 of 2 responses" in said[0] and "at step 1" in said[1]


def test_mini_batches_of_one_step_are_measured_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rollspec_verl import trainer as hooks
    from rollspec_verl.rollouts import Rollouts

    batches = {
        "first": Rollouts([as_tokens([1])] * 3, [as_tokens([4])] * 3, [1.0] * 3, [], [], ["0_0"] * 3, [(3, 3)] * 3),
        "second": Rollouts([as_tokens([2])], [as_tokens([5] * 9)], [0.0], [], [], ["0_0"], [(3, 4)]),
    }
    monkeypatch.setattr(Rollouts, "read", batches.__getitem__)
    monkeypatch.setenv(hooks.ENV_LENGTHS, str(tmp_path / "lengths.jsonl"))
    handle = Handle({"stats": STATS})
    trainer = module().PPOTrainer(tmp_path, handle)
    trainer.trainer_mode = "separate_async"
    for name in batches:
        trainer._compute_advantage(name, metrics={})
    assert [op for op, _ in handle.calls] == ["rewards", "rewards"], "at once"
    out = trainer._consume_sync_metrics()
    assert out["rollspec/reward/mean"] == 0.75 and out["rollspec/length/max"] == 9
    assert out["rollspec/policy/spanning"] == 1 and out["rollspec/faults"] == 0
    assert "rollspec/rollout/wait_share" in out and "rollspec/rollout/generation_share" not in out
    (line,) = (tmp_path / "lengths.jsonl").read_text().splitlines()
    row = json.loads(line)
    assert row["lengths"] == [1, 1, 1, 9] and row["versions"][3] == [3, 4] and len(row["keys"][3]) == 2
    assert "rollspec/reward/mean" not in trainer._consume_sync_metrics(), "the next step has none yet"


def test_broken_options_do_not_end_a_running_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = module().PPOTrainer(tmp_path, Handle(), custom={"rollspec": {"no_such": 1}})
    with caplog.at_level(logging.ERROR, "rollspec"):
        assert trainer.step({}, {}) == "stepped"
    assert "no_such" in caplog.text


def test_history_is_saved_with_a_checkpoint_and_dropped_with_its_weights(tmp_path: Path) -> None:
    handles = Handle(), Handle()
    trainer = module().PPOTrainer(tmp_path, *handles)
    trainer.global_steps = 6
    for step in (2, 4):
        (tmp_path / f"global_step_{step}" / "rollspec").mkdir(parents=True)
    (tmp_path / "global_step_4" / "actor").mkdir()
    trainer.look = lambda: [h.calls[0] for h in handles]  # ours is there before verl names its latest checkpoint
    trainer._save_checkpoint()
    for i, handle in enumerate(handles):
        assert handle.calls == [("save", {"dir": str(tmp_path / "global_step_6" / "rollspec" / f"replica_{i}")})]
    assert not (tmp_path / "global_step_2" / "rollspec").exists()
    assert (tmp_path / "global_step_4" / "rollspec").exists()


@pytest.mark.parametrize(("mode", "part"), [("auto", "replica_0"), ("resume_path", "replica_0"), ("auto", "drafter")])
def test_history_is_loaded_from_the_checkpoint_that_was_resumed(tmp_path: Path, mode: str, part: str) -> None:
    handles = Handle(), Handle()
    elsewhere = tmp_path / "other" / "global_step_4"
    saved = (elsewhere if mode == "resume_path" else tmp_path / "global_step_4") / "rollspec" / "replica_0"
    (saved.parent / part).mkdir(parents=True)
    trainer = module().PPOTrainer(tmp_path, *handles)
    trainer.config.trainer.update({"resume_mode": mode, "resume_from_path": str(elsewhere)})
    manager = agent_loops()
    assert trainer.fit(manager) == "fitted" and handles[0].calls == [("tidy", {})], (
        "from scratch there is nothing to load"
    )
    trainer.global_steps = 4
    trainer.fit(manager)
    for handle in handles:  # more replicas than when it was saved
        assert handle.calls[-2:] == [("load", {"dir": str(saved)}), ("tidy", {})]


def test_a_dead_engine_is_named_and_nothing_is_sent_to_it(tmp_path: Path) -> None:
    from rollspec_verl.servers import EngineLost

    trainer = module().PPOTrainer(tmp_path, Handle(), Handle(reason="its process has ended"))
    trainer.error = RuntimeError("no materializable trajectories")
    with pytest.raises(EngineLost, match="replica 1 is dead") as e:
        trainer.step({}, {})
    assert e.value.__cause__ is trainer.error
    manager = agent_loops()
    trainer.fit(manager)
    with pytest.raises(EngineLost):
        manager.generate_sequences("prompts")


def test_an_error_with_living_engines_stays_what_it_was(tmp_path: Path) -> None:
    trainer = module().PPOTrainer(tmp_path, Handle(), Handle(reason=None))  # the second does not answer in time
    trainer.error = ValueError("theirs")
    with pytest.raises(ValueError, match="theirs"):
        trainer.step({}, {})


def test_weights_are_not_sent_to_a_dead_engine() -> None:
    from rollspec_verl import servers
    from verl.utils.ray_utils import auto_await

    @plays("verl.checkpoint_engine.base:CheckpointEngineManager")
    class CheckpointEngineManager:
        def __init__(self, *handles: Any) -> None:
            self.replicas = [like("verl.workers.rollout.replica:RolloutReplica", server_handle=h) for h in handles]
            self.sent = 0

        @auto_await
        async def update_weights(self, global_steps: int | None = None) -> str:
            self.sent += 1
            return "sent"

    found = ModuleType("checkpoint_engine.base")
    found.__dict__.update(CheckpointEngineManager=CheckpointEngineManager, auto_await=auto_await)
    servers.install(found)
    servers.install(found)
    # A reward model's server has no such method, a slow one gives no answer: neither is dead.
    assert (
        CheckpointEngineManager(Handle(), like("ray.actor:ActorHandle"), Handle(reason=None)).update_weights(3)
        == "sent"
    )
    for handle in (Handle(reason="its process has ended"), Handle(reason=ActorDiedError())):
        manager = CheckpointEngineManager(handle)
        with pytest.raises(servers.EngineLost, match="replica 0 is dead"):
            manager.update_weights(3)
        assert manager.sent == 0

    async def in_a_coroutine() -> str:  # as the fully asynchronous recipe calls it
        return await CheckpointEngineManager(Handle()).update_weights(global_steps=3)

    assert asyncio.run(in_a_coroutine()) == "sent"


def test_polling_is_prompt_cheap_and_left_alone_in_asynchronous_training(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    monkeypatch.setattr("time.sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    found = module()
    buffer, slow, other = found.ReplayBuffer(), found.ReplayBuffer(), found.ReplayBufferAsync()
    slow.slow = 0.02
    for b in (buffer, slow, other):
        b._sync_metadata_from_transfer_queue()
    assert buffer.poll_interval == 0.05
    assert slow.poll_interval == pytest.approx(0.4)
    assert other.poll_interval == 2.0


def test_a_weight_sync_without_a_receiver_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zmq = pytest.importorskip("zmq")
    from rollspec_verl import servers

    @plays("verl.workers.rollout.vllm_rollout.bucketed_weight_transfer:BucketedWeightSender")
    class BucketedWeightSender:
        socket: Any = None

        def _init_socket(self) -> None:
            self.socket = zmq.Context.instance().socket(zmq.REQ)
            self.socket.bind(f"ipc://{tmp_path}/s")

        async def async_send_weights(self, weights: Any) -> None:
            self._init_socket()
            try:
                self.socket.send(b"")
                self.socket.recv()
            finally:
                self.socket.close()

    found = ModuleType("bucketed_weight_transfer")
    found.BucketedWeightSender = BucketedWeightSender  # type: ignore[attr-defined]
    servers.install_sender(found)
    servers.install_sender(found)
    monkeypatch.setattr(servers, "BUCKET_SECONDS", 0.1)
    with pytest.raises(TimeoutError, match="took no weights"):
        asyncio.run(BucketedWeightSender().async_send_weights([]))
