"""The mark that verl's abort-and-submit-again loop carries, in verl's own loop against a stand-in for its servers."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections import OrderedDict
from types import ModuleType
from typing import Any

import pytest
from vllm_like import like, plays

from rollspec.log_once import LogOnce

omegaconf = pytest.importorskip("omegaconf")
pytest.importorskip("verl")


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollspec_verl.resume.log_once", LogOnce())


SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer"


def client(answers: list[list[int]], name: str = "vllm", **custom: Any) -> tuple[Any, list[tuple[list[int], Any]]]:
    """verl's client, whose server says `answers` in turn, all but the last aborted, and what that was asked."""
    from rollspec_verl import resume
    from verl.workers.rollout import llm_server
    from verl.workers.rollout.replica import TokenOutput

    asked: list[tuple[list[int], Any]] = []

    @plays("ray.actor:ActorMethod")
    class Generate:
        async def remote(self, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any) -> Any:
            asked.append((list(prompt_ids), copy.deepcopy(sampling_params)))
            said = answers[len(asked) - 1]
            reason = "aborted" if len(asked) < len(answers) else "completed"
            fields = {"global_steps": len(asked)}
            return TokenOutput(token_ids=said, log_probs=[-1.0] * len(said), stop_reason=reason, extra_fields=fields)

    @plays("verl.workers.rollout.llm_server:FullyAsyncLLMServerClient")
    class Client(llm_server.FullyAsyncLLMServerClient):
        async def _acquire_server(self, request_id: str, **extra: Any) -> Any:
            return "0", like(SERVER, generate=Generate())

        def _release_server(self, *args: Any, **kwargs: Any) -> None:
            pass

    module = ModuleType("llm_server")
    module.__dict__.update(FullyAsyncLLMServerClient=Client, LLMServerClient=llm_server.LLMServerClient)
    for _ in range(2):
        resume.install(module)
    rollout = {"name": name, "response_length": 8, "custom": {"rollspec": custom} if custom else {}}
    return Client(omegaconf.OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})), asked


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.workers.rollout import llm_server

    async def sleep(seconds: float) -> None:
        pass

    monkeypatch.setattr(llm_server.asyncio, "sleep", sleep)


def rollout(client: Any, **kwargs: Any) -> Any:
    given = {"temperature": 1.0, "extra_args": {"theirs": 1, "rollspec": {"sample": "3_0"}}}
    out = asyncio.run(client.generate("r", prompt_ids=[5, 6], sampling_params=given, **kwargs))
    assert given == {"temperature": 1.0, "extra_args": {"theirs": 1, "rollspec": {"sample": "3_0"}}}, "it is shared"
    return out


def test_all_submissions_of_a_rollout_carry_its_name_and_where_its_prompt_ends() -> None:
    me, asked = client([[], [10, 11], [12], [13]])
    assert rollout(me).token_ids == [10, 11, 12, 13]
    assert [prompt for prompt, _ in asked] == [[5, 6], [5, 6], [5, 6, 10, 11], [5, 6, 10, 11, 12]]
    assert [params["max_tokens"] for _, params in asked] == [8, 8, 6, 5]
    marks = [params["extra_args"]["rollspec"] for _, params in asked]
    assert [mark.pop("spans", []) for mark in marks] == [[], [], [[0, 2]], [[0, 2], [2, 3]]]
    assert all(mark == marks[0] for mark in marks) and marks[0]["prompt_tokens"] == 2 and marks[0]["sample"] == "3_0"
    assert asked[0][1]["extra_args"]["theirs"] == 1
    first = marks[0]["origin"]
    asked.clear()
    rollout(me)
    assert asked[0][1]["extra_args"]["rollspec"]["origin"] != first


@pytest.mark.parametrize("options", [{"enabled": False}, {"name": "sglang"}])
def test_nothing_is_marked_where_rollspec_does_nothing(options: dict[str, Any]) -> None:
    me, asked = client([[10]], **options)
    assert rollout(me).token_ids == [10] and asked[0][1]["extra_args"]["rollspec"] == {"sample": "3_0"}


def test_what_cannot_be_marked_goes_on_and_says_so_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollspec_verl import resume

    with caplog.at_level(logging.WARNING, "rollspec"):
        for _ in range(2):
            me, asked = client([[10], [11]])
            assert rollout(me, image_data=["x"]).token_ids == [10, 11]
            assert asked[1][1]["extra_args"]["rollspec"] == {"sample": "3_0"}
        assert len(caplog.records) == 1 and "images, video or sound that are aborted" in caplog.text
        monkeypatch.setattr(resume, "_on", lambda config: 1 / 0)
        for _ in range(2):
            assert rollout(client([[10], [11]])[0]).token_ids == [10, 11]
    assert len(caplog.records) == 3 and caplog.text.count("ZeroDivisionError") == 2, "of resuming, and of turns"


def test_the_hook_is_on_verls_own_client() -> None:
    import rollspec_verl  # noqa: F401
    from verl.workers.rollout import llm_server

    assert llm_server.FullyAsyncLLMServerClient.generate._rollspec


def test_a_conversation_is_one_rollout_however_often_it_comes_back() -> None:
    """Three turns, the second aborted once; then the same id with another conversation, as under full determinism."""
    me, asked = client([[10, 11], [], [12], [13]])
    prompts = [[5, 6], [5, 6, 10, 11, 90], [5, 6, 10, 11, 90, 12, 91, 92]]

    def say(prompt: list[int]) -> None:
        asyncio.run(me.generate("r", prompt_ids=prompt, sampling_params={"temperature": 1.0}))

    marks = []
    for prompt, answers in zip(prompts, ([[10, 11]], [[], [12]], [[13]]), strict=True):
        me, asked = again(me, answers)
        say(prompt)
        assert len({tuple(params["extra_args"]["rollspec"]["turn"]) for _, params in asked}) == 1
        marks.append(asked[0][1]["extra_args"]["rollspec"]["turn"])
    names, *numbers = zip(*marks, strict=True)
    assert len(set(names)) == 1 and numbers == [(0, 1, 2), (2, 2, 2), (2, 4, 6)]
    for prompt in (prompts[0], [5, 6, 10]):
        me, asked = again(me, [[7]])
        say(prompt)
        name, *rest = asked[0][1]["extra_args"]["rollspec"]["turn"]
        assert name not in names and rest == [0, len(prompt), len(prompt)]


def again(me: Any, answers: list[list[int]]) -> tuple[Any, list[tuple[list[int], Any]]]:
    """`client(answers)`, which remembers the conversations of `me`."""
    other, asked = client(answers)
    other.__dict__["_rollspec_conversations"] = me.__dict__.get("_rollspec_conversations", OrderedDict())
    return other, asked


def test_the_plain_client_marks_turns_as_well() -> None:
    from verl.workers.rollout import llm_server

    me, asked = client([[10]])
    plain = llm_server.LLMServerClient.generate
    out = asyncio.run(plain(me, "r", prompt_ids=[5, 6], sampling_params={}))
    assert out.token_ids == [10]
    own = asked[0][1]["extra_args"]["rollspec"]
    assert own["turn"][1:] == [0, 2, 2] and "origin" not in own


def test_a_turn_that_is_named_already_keeps_its_name_and_can_resume() -> None:
    me, asked = client([[10], [11]])
    given = {"extra_args": {"rollspec": {"turn": ["theirs", 0, 2, 2]}}}
    asyncio.run(me.generate("r", prompt_ids=[5, 6], sampling_params=given))
    marks = [params["extra_args"]["rollspec"] for _, params in asked]
    assert [mark["turn"][0] for mark in marks] == ["theirs"] * 2 and marks[0]["origin"] == marks[1]["origin"]
    assert marks[1]["spans"] == [[0, 1]]
