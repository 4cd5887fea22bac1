"""The fully asynchronous recipe's hooks: on verl's own class, and on a stand-in for it what they send and add."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from vllm_like import like, plays

from rollspec.errors import ConfigError
from rollspec.proposal.base import prompt_key
from rollspec.telemetry.engine_stats import EngineStats

cloudpickle = pytest.importorskip("ray.cloudpickle")
omegaconf = pytest.importorskip("omegaconf")
pytest.importorskip("verl")
torch = pytest.importorskip("torch")

STATS = EngineStats(steps=4, requests=8, verified=4, drafted=10, accepted=5, emitted=13, version=3).to_dict()


def batch() -> Any:
    """A prompt's two samples as verl's agent loops give them; the second one's tool said 70 and 71."""
    from verl import DataProto

    tensors = {
        "prompts": [[0, 1, 2], [0, 1, 2]],
        "responses": [[4, 5, 6, 9, 9], [7, 70, 71, 8, 9]],
        "attention_mask": [[0, 1, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 1, 0]],
        "response_mask": [[1, 1, 1, 0, 0], [1, 0, 0, 1, 0]],
        "rm_scores": [[0.0, 0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.5, 0.0]],
        "rollout_log_probs": [[-0.1, -0.2, -0.3, 0.0, 0.0], [-0.4, 0.0, 0.0, -0.5, 0.0]],
    }
    notes = {"min_global_steps": np.array([3, 2], object), "max_global_steps": np.array([3, 3], object)}
    return DataProto.from_dict({k: torch.tensor(v) for k, v in tensors.items()}, notes)


def test_a_batch_of_the_agent_loops_is_read() -> None:
    from rollspec_verl.rollouts import Rollouts

    found = Rollouts.of(batch())
    assert [p.tolist() for p in found.prompts] == [[1, 2]] * 2
    assert [r.tolist() for r in found.responses] == [[4, 5, 6], [7, 70, 71, 8]]
    assert found.lengths == [3, 2] and found.scores == [1.0, 0.5] and found.spanning == 1
    assert [v.tolist() for v in found.engine_logprobs] == [pytest.approx(x) for x in ([-0.1, -0.2, -0.3], [-0.4, -0.5])]
    turn = [prompt_key([1, 2]), prompt_key([7]), 0.5]
    assert turn in found.rewards() and len(found.rewards()) == 3


def test_verls_own_class_is_hooked_and_its_coroutines_stay_such() -> None:
    from rollspec_verl import fully_async
    from verl.experimental.fully_async_policy import fully_async_rollouter as verls

    from rollspec.engine.vllm.hooks.base import MARK

    cls = verls.FullyAsyncRollouter.__ray_metadata__.modified_class
    fully_async.install(verls)  # as importing it did already
    once = {name: getattr(cls, name) for name in fully_async.HOOKS}
    fully_async.install(verls)
    assert once == {name: getattr(cls, name) for name in fully_async.HOOKS}, "a second time changes nothing"
    sent = cloudpickle.dumps(cls)  # as Ray sends it to the actor's process
    assert MARK.encode() in sent, "the class goes by value"
    for name, around in fully_async.HOOKS.items():
        cells = inspect.getclosurevars(once[name]).nonlocals
        assert cells["around"] is around and callable(cells["original"]), name
        assert inspect.iscoroutinefunction(once[name]) == (name != "load_checkpoint"), name
        assert around.__name__.encode() in sent, name


def test_another_verl_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    from rollspec_verl import fully_async

    class Other:
        async def fit(self) -> None: ...

    given = Other.fit
    for module in (ModuleType("another"), of(Other)):
        fully_async.install(module)
        assert "reset_staleness" in caplog.text and Other.fit is given
        caplog.clear()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What servers are asked; one of two answers `stats`."""
    from rollspec_verl import servers

    made: list[tuple[str, Any]] = []

    def call(trainer: Any, op: str, payload: Any = lambda i: {}, wait: bool = True) -> list[dict[str, Any]]:
        count = len(servers.replicas_of(trainer))
        made.append((op, [payload(i) for i in range(count)]))
        return [STATS, {}] if op == "stats" else [{}] * count

    monkeypatch.setattr(servers, "call", call)
    monkeypatch.setattr(servers, "tidy", lambda trainer: made.append(("tidy", len(servers.replicas_of(trainer)))))
    return made


def rollouter(folder: Path) -> Any:
    """A stand-in for the actor, hooked: one standalone replica, one on the trainer's devices."""
    from rollspec_verl import fully_async

    one, lent = (like("verl.workers.rollout.replica:RolloutReplica", server_handle=object()) for _ in range(2))

    @plays("verl.experimental.fully_async_policy.fully_async_rollouter:FullyAsyncRollouter")
    class Rollouter:
        def __init__(self) -> None:
            self.config = omegaconf.OmegaConf.create(
                {
                    "actor_rollout_ref": {"rollout": {"name": "vllm", "custom": {"rollspec": "suffix_only"}}},
                    "trainer": {"default_local_dir": str(folder), "resume_mode": "auto"},
                }
            )
            self.llm_server_manager = like(
                "verl.experimental.fully_async_policy.fully_async_rollouter:FullyAsyncLLMServerManager",
                get_replicas=lambda: [one, lent], hybrid_replicas={"hybrid_0": lent},
            )  # fmt: skip
            self.global_steps = 1  # as verl's has it, which counts prompts

        async def init_workers(self) -> None: ...

        async def _process_single_sample_streaming(self, rollout_sample: Any) -> None:
            rollout_sample.full_batch = batch()

        async def reset_staleness(self) -> dict[str, float]:
            return {"fully_async/rollouter/idle_ratio": 0.5}

        async def save_checkpoint(self, local_global_step_folder: str) -> None: ...

        def load_checkpoint(self) -> None: ...

        async def fit(self) -> None:
            raise RuntimeError("the job's own error")

    fully_async.install(of(Rollouter))
    return Rollouter()


def rollout_sample() -> Any:
    return like("verl.experimental.fully_async_policy.detach_utils:RolloutSample", full_batch=None)


def of(cls: type) -> Any:
    """A module that has `cls` as Ray's decorator leaves it."""
    actor = like("ray.actor:ActorClass")
    actor.__ray_metadata__ = like("ray.actor:_ActorClassMetadata", modified_class=cls)  # which Ray sets on it
    return like("verl.experimental.fully_async_policy.fully_async_rollouter", FullyAsyncRollouter=actor)


def test_rewards_measurements_and_checkpoints(tmp_path: Path, calls: list[tuple[str, Any]]) -> None:
    actor = rollouter(tmp_path)
    asyncio.run(actor.init_workers())
    assert actor.config.actor_rollout_ref.rollout.custom.rollspec.preset == "suffix_only"
    for _ in range(2):
        asyncio.run(actor._process_single_sample_streaming(rollout_sample()))
    op, (first, second) = calls.pop()
    assert op == "rewards" and first == second and len(first["items"]) == 3
    out = asyncio.run(actor.reset_staleness())
    assert out["fully_async/rollouter/idle_ratio"] == 0.5 and out["rollspec/faults"] == 0
    assert out["rollspec/accept/drafted"] == 10 and out["rollspec/reward/mean"] == pytest.approx(0.75)
    assert out["rollspec/policy/spanning"] == 2
    assert "rollspec/reward/mean" not in asyncio.run(actor.reset_staleness()), "nothing was rolled out since"
    step = tmp_path / "global_step_2"
    asyncio.run(actor.save_checkpoint(str(step)))
    assert calls[-1] == ("save", [{"dir": str(step / "rollspec" / f"replica_{i}")} for i in range(2)])
    (step / "rollspec" / "replica_0").mkdir(parents=True)
    actor.load_checkpoint()
    assert calls[-1][0] == "save", "there is no latest one"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    loaded = ("load", [{"dir": str(step / "rollspec" / "replica_0")}] * 2)
    config = actor.config.trainer
    config.resume_from_path = str(step)
    for mode, done in (("disable", False), ("auto", True), ("disable", False), ("resume_path", True)):
        config.resume_mode, before = mode, len(calls)
        actor.load_checkpoint()
        assert calls[before:] == [loaded] * done, mode
    assert asyncio.run(actor.reset_staleness())["rollspec/faults"] == 0
    with pytest.raises(RuntimeError, match="the job's own error"):
        asyncio.run(actor.fit())
    assert calls[-1] == ("tidy", 2)


def test_what_counts_by_the_trainers_steps_is_refused(tmp_path: Path) -> None:
    actor = rollouter(tmp_path)
    rollout = actor.config.actor_rollout_ref.rollout
    rollout.custom.rollspec = "spec_rl"
    with pytest.raises(ConfigError, match=r"reuse\.mode = lenient counts epochs by the trainer's steps"):
        asyncio.run(actor.init_workers())
    rollout.custom.rollspec = {"preset": "long_tail", "drafter": {"mode": "policy"}}
    with pytest.raises(ConfigError, match=r"drafter\.mode = policy reads the trainer's log-prob pass"):
        asyncio.run(actor.init_workers())
    rollout.custom.rollspec = {"preset": "spec_rl", "enabled": False}
    asyncio.run(actor.init_workers())


def test_a_fault_of_ours_is_counted_and_left_out(
    tmp_path: Path, calls: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollspec_verl.rollouts import Rollouts

    actor = rollouter(tmp_path)
    monkeypatch.setattr(Rollouts, "of", lambda batch: 1 / 0)
    asyncio.run(actor._process_single_sample_streaming(rollout_sample()))
    assert asyncio.run(actor.reset_staleness())["rollspec/faults"] == 1
