"""Lenient reuse in verl's server, which is a stand-in, with vLLM's own sampling parameters: what is served."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from installed import needs_vllm
from vllm_like import like, plays

from rollspec.config import RollspecConfig
from rollspec.log_once import LogOnce
from rollspec.proposal.base import prompt_key
from rollspec.proposal.history import OLD_RESPONSES as FILE
from rollspec.telemetry.faults import Faults

pytest.importorskip("verl")
pytestmark = needs_vllm


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollspec_verl.reuse.log_once", LogOnce())


TOKENIZER = "transformers.tokenization_utils_base:PreTrainedTokenizerBase"


@plays("verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer", "rollspec_call")
class Base:
    """What of verl's server the mixin touches."""

    def __init__(self) -> None:
        self.config = like(
            "verl.workers.config.rollout:RolloutConfig",
            response_length=8,
            prompt_length=8,
            max_model_len=32,
            enable_rollout_routing_replay=False,
            full_determinism=False,
        )
        self.model_config = like(
            "verl.workers.config.model:HFModelConfig",
            tokenizer=like(TOKENIZER, get_vocab=lambda: {"a": 0}, __len__=lambda: 1),
        )
        self.replica_rank = self.global_steps = self._admitting = 0
        self.rejects: str | None = None
        self.asked: list[tuple[list[int], dict[str, Any], dict[str, Any]]] = []
        self.calls: list[str] = []
        self.stats: dict[str, Any] = {"faults": {"theirs": 1}}

    async def _park_until_admitted(self, request_id: str) -> str | None:
        self._admitting += self.rejects is None
        return self.rejects

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        self.asked.append((list(prompt_ids), sampling_params, kwargs))
        return like(
            "verl.workers.rollout.replica:TokenOutput",
            token_ids=[90, 91],
            log_probs=[-9.0, -9.1],
            stop_reason="completed",
        )

    async def rollspec_call(self, op: str, payload: dict[str, Any]) -> dict[str, Any]:
        self.calls.append(op)
        return dict(self.stats)


def make(scores: list[float], old: list[int] | None = None) -> Any:
    """A server that has an old response [10, 11, 12, 1] (1 ends it), scored as `scores` by the present policy."""
    from rollspec_verl.reuse import ReusingServer

    from rollspec.sampling.lenient_reuse import LenientReuse, old_responses

    class Server(ReusingServer, Base):
        pass

    async def generate(prompt: dict[str, Any], **kwargs: Any) -> Any:
        tokens = prompt["prompt_token_ids"]
        found = [
            {t: like("vllm.logprobs:Logprob", logprob=x)} for t, x in zip(tokens, [0.0, 0.0, *scores], strict=True)
        ]
        yield like(
            "vllm.outputs:RequestOutput",
            prompt_token_ids=tokens,
            prompt_logprobs=[None, *found[1:]],
            finished=True,
            outputs=[object()],
        )

    server = Server()
    server.engine = like("vllm.v1.engine.async_llm:AsyncLLM", generate=generate)  # type: ignore[attr-defined]
    server.rollspec_reuse_faults, server.rollspec_tokenizer = Faults(), "T"
    config = RollspecConfig.load({"reuse": {"mode": "lenient"}}, env={})
    server.rollspec_reuse = LenientReuse(config.reuse, old_responses(1 << 20), 32, 100, frozenset({1}))
    tokens = [10, 11, 12, 1] if old is None else old
    server.rollspec_reuse.remember([(prompt_key([5, 6]), "0_0", tokens, [-1.0] * len(tokens))], 0)
    return server


def ask(server: Any, **kwargs: Any) -> Any:
    params = {"temperature": 1.0, "logprobs": True, "extra_args": {"rollspec": {"sample": "0_0"}}}
    return asyncio.run(server.generate([5, 6], params, request_id="r", **kwargs))


def test_an_accepted_response_is_not_generated() -> None:
    server = make([-0.5, -0.6, -0.7, -0.8])
    server.global_steps = 4
    out = ask(server)
    assert (out.token_ids, out.stop_reason, out.extra_fields["global_steps"]) == ([10, 11, 12, 1], "completed", 4)
    assert out.log_probs == pytest.approx([-0.5, -0.6, -0.7, -0.8])
    assert server.asked == [] and server._admitting == 0


def test_a_cut_response_is_continued_and_stitched() -> None:
    server = make([-0.5, -0.6, -90.0, -0.8])
    out = ask(server, priority=2)
    assert out.token_ids == [10, 11, 90, 91] and out.log_probs == pytest.approx([-0.5, -0.6, -9.0, -9.1])
    ((prompt, params, kwargs),) = server.asked
    assert prompt == [5, 6, 10, 11] and params["max_tokens"] == 8 - 2 and kwargs == {"request_id": "r", "priority": 2}
    assert params["extra_args"] == {"rollspec": {"prompt_tokens": 2}}, "drafts and history know where the prompt ends"


def test_an_aborted_rollout_goes_on_without_starting_over() -> None:
    server = make([-0.5, -0.6, -90.0, -0.8])
    mark = {"sample": "0_0", "origin": "x", "prompt_tokens": 2}

    def submit(tokens: list[int]) -> Any:
        params = {"temperature": 1.0, "logprobs": True, "extra_args": {"rollspec": mark}}
        return asyncio.run(server.generate([5, 6, *tokens], params, request_id="r"))

    said = submit([]).token_ids
    assert said == [10, 11, 90, 91] and submit(said).token_ids == [90, 91]
    (_, first, _), (prompt, again, _) = server.asked
    assert prompt == [5, 6, 10, 11, 90, 91]
    assert first["extra_args"]["rollspec"] == {"origin": "x", "prompt_tokens": 2}
    assert again["extra_args"]["rollspec"] == mark, "drafts and history are the rollout's"
    assert server.rollspec_reuse.drain()["requests"] == 1


def test_what_is_not_reused_is_generated_by_verl_alone(caplog: pytest.LogCaptureFixture) -> None:
    server = make([-90.0] * 4)
    assert ask(server).token_ids == [90, 91] and server.asked[0][0] == [5, 6]
    assert "max_tokens" not in server.asked[0][1]
    server = make([-1.0] * 4)
    with caplog.at_level(logging.WARNING, "rollspec"):
        assert ask(server, image_data=["x"]).token_ids == [90, 91]
    assert "images, video or sound" in caplog.text
    server.rejects = "paused"
    assert ask(server).token_ids == [90, 91] and server._admitting == 0
    server.rollspec_reuse = None
    assert ask(server).token_ids == [90, 91]


def test_the_limit_is_verls() -> None:
    server = make([-1.0] * 4, old=[10, 11, 12, 13])
    for params, prompt, limit in (({}, 2, 8), ({}, 12, 4), ({"max_new_tokens": 3}, 2, 3), ({"max_tokens": 99}, 30, 2)):
        assert server._rollspec_limit(params, prompt) == limit


def test_a_fault_is_counted_and_the_rollout_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    server = make([-1.0])  # scores of another length than the prompt
    with caplog.at_level(logging.ERROR, "rollspec"):
        assert ask(server).token_ids == ask(server).token_ids == [90, 91]
    assert len(caplog.records) == 1 and "lenient reuse failed" in caplog.text
    assert server._admitting == 0
    stats = asyncio.run(server.rollspec_call("stats", {}))
    assert stats["faults"] == {"theirs": 1, "lenient reuse": 2} and stats["lenient"]["requests"] == 2
    assert asyncio.run(server.rollspec_call("stats", {}))["faults"] == {"theirs": 1}


def test_old_responses_are_saved_once_and_loaded_by_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = make([]), make([], old=[])
    second.replica_rank = 1
    for i, server in enumerate((second, first)):
        asyncio.run(server.rollspec_call("save", {"dir": str(tmp_path / f"replica_{i}")}))
        assert (tmp_path / FILE).is_file() == (server is first)
    second.rollspec_reuse.version = 9
    asyncio.run(second.rollspec_call("load", {"dir": str(tmp_path / "replica_1")}))
    found = second.rollspec_reuse.responses.part(prompt_key([5, 6]), "0_0")
    assert found.tokens.tolist() == [10, 11, 12, 1] and first.calls == ["save"]
    second.rollspec_tokenizer = "another"
    with caplog.at_level(logging.ERROR, "rollspec"):
        asyncio.run(second.rollspec_call("load", {"dir": str(tmp_path / "replica_1")}))
    assert "is of another tokenizer" in caplog.text and second.rollspec_reuse_faults.drain() == {
        "loading old responses": 1
    }


def test_a_server_that_cannot_reuse_says_why(caplog: pytest.LogCaptureFixture) -> None:
    from rollspec_verl.reuse import ReusingServer

    class Server(ReusingServer, Base):
        lora_as_adapter, _disaggregation_role = True, "null"

    config = RollspecConfig.load("spec_rl", env={})
    with caplog.at_level(logging.WARNING, "rollspec"):
        for info in ({"reuse": "lenient"}, {}):
            server = Server()
            asyncio.run(server.rollspec_begin_reuse(config, info))
            assert server.rollspec_reuse is None
    assert "LoRA adapter" in caplog.text and "runs without rollspec" in caplog.text
