"""Lenient reuse in verl's processes, against stand-ins: who says which sample it is, and what is sent."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm_like import like, plays

from rollspec.log_once import LogOnce
from rollspec.proposal.base import as_tokens, prompt_key

pytest.importorskip("verl")

LENIENT = {"rollspec": {"reuse": {"mode": "lenient"}}}


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollspec_verl.reuse.log_once", LogOnce())


# ---- the agent loop's worker
# --------------------------------------------------------------------------------------------


def agent(
    custom: dict[str, Any],
    validate: bool = False,
    name: str = "SingleTurnAgentLoop",
    own: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """The sampling parameters that an agent loop sends."""
    from rollspec_verl import reuse

    @plays("verl.experimental.agent_loop.agent_loop:AgentLoopBase")
    class AgentLoopBase:
        def __init__(self) -> None:
            self.config = self
            self.rollout_config = {"custom": custom}

    @plays("verl.experimental.agent_loop.single_turn_agent_loop:SingleTurnAgentLoop")
    class SingleTurnAgentLoop(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> dict[str, Any]:
            return sampling_params

    @plays("verl.experimental.agent_loop.tool_agent_loop:ToolAgentLoop")
    class ToolAgentLoop(SingleTurnAgentLoop):
        run = SingleTurnAgentLoop.run

    module = ModuleType("agent_loop")
    module.__dict__.update(AgentLoopBase=AgentLoopBase, rollout_trace_attr=lambda **_: contextlib.nullcontext())
    single = ModuleType("single_turn_agent_loop")
    single.__dict__["SingleTurnAgentLoop"] = SingleTurnAgentLoop
    for _ in range(2):
        reuse.install(module)
        reuse.install_single(single)
    extra = {"theirs": 1} if own is None else {"theirs": 1, "rollspec": own}
    given = {"temperature": 1.0, "extra_args": copy.deepcopy(extra)}

    async def work() -> Any:
        with module.rollout_trace_attr(validate=validate):
            reuse._REUSES.clear()
            loop = {"SingleTurnAgentLoop": SingleTurnAgentLoop, "ToolAgentLoop": ToolAgentLoop}[name]()
            return await loop.run(given, **{"session_id": 3, **kwargs})

    out = asyncio.run(work())
    assert given == {"temperature": 1.0, "extra_args": extra}, "siblings share this mapping"
    return out


def test_a_request_says_which_sample_it_is() -> None:
    assert agent(LENIENT)["extra_args"] == {"theirs": 1, "rollspec": {"sample": "3_0"}}


def test_what_the_caller_said_of_a_request_stays() -> None:
    own = {"domain": "code", "private": True}
    assert agent(LENIENT, own=own)["extra_args"] == {"theirs": 1, "rollspec": {**own, "sample": "3_0"}}


@pytest.mark.parametrize(
    "custom", [{}, {"rollspec": {"enabled": False, **LENIENT["rollspec"]}}, {"rollspec": {"x": 1}}]
)
def test_nothing_is_said_where_nothing_is_reused(custom: dict[str, Any]) -> None:
    assert agent(custom)["extra_args"] == {"theirs": 1}


def test_validation_and_other_agents_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rollspec"):
        assert agent(LENIENT, validate=True)["extra_args"] == {"theirs": 1}
        assert not caplog.records
        for _ in range(2):
            assert agent(LENIENT, name="ToolAgentLoop")["extra_args"] == {"theirs": 1}
        assert agent(LENIENT, session_id=None)["extra_args"] == {"theirs": 1}
    assert len(caplog.records) == 2 and "agent loop ToolAgentLoop are not reused" in caplog.text


# ---- the task runner
# ----------------------------------------------------------------------------------------------------


def rollouts(**changes: Any) -> Any:
    from rollspec_verl.rollouts import Rollouts

    half = np.log([0.5, 0.5])
    fields: dict[str, Any] = {
        "prompts": [as_tokens([1, 2])] * 4,
        "responses": [as_tokens([3, 4]), as_tokens([3, 4]), as_tokens([5]), as_tokens([])],
        "scores": [0.0] * 4,
        "engine_logprobs": [half, half[:1], half[:1], half[:0]],
        "trainer_logprobs": [],
        "samples": ["0_0", "1_0", "2_1", "3_0"],
    }
    return Rollouts(**{**fields, **changes})


def test_only_whole_single_outputs_are_sent_and_to_every_server(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollspec_verl import reuse

    monkeypatch.setitem(sys.modules, "ray", like("ray", put=lambda value: ("ref", value)))
    got: list[Any] = []
    handle = SimpleNamespace(rollspec_remember=like("ray.actor:ActorMethod", remote=lambda *args: got.append(args)))
    replicas = [like("verl.workers.rollout.replica:RolloutReplica", server_handle=h) for h in (handle, None)] * 2
    # One with tool output, one of several outputs and an empty one are left out.
    reuse.remember(replicas, rollouts(), 7)
    assert len(got) == 2
    ((_, ((key, sample, tokens, logprobs),)), version) = got[0]
    assert (key, sample, tokens.tolist(), version) == (prompt_key([1, 2]), "0_0", [3, 4], 7)
    assert logprobs.tolist() == pytest.approx([-0.693, -0.693], abs=1e-3)


def test_without_log_probs_it_says_which_option_to_set(caplog: pytest.LogCaptureFixture) -> None:
    from rollspec_verl import reuse

    with caplog.at_level(logging.WARNING, "rollspec"):
        assert reuse.reusable(rollouts(engine_logprobs=[])) == [] == reuse.reusable(rollouts(engine_logprobs=[]))
    assert len(caplog.records) == 1 and "rollout.calculate_log_probs=true" in caplog.text
