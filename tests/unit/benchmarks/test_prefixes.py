"""Prefixes that a lossy arm's responses start from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm_like import like

from benchmarks import peer_arms, two_policies
from benchmarks.peer_arms import PEERS
from benchmarks.prefixes import Prefixes
from rollspec.sampling import scoring


def test_prefixes_are_of_lossy_arms_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = like("vllm.config:ModelConfig", max_model_len=64, get_vocab_size=lambda: 32)
    engine = like("vllm.v1.engine.llm_engine:LLMEngine", vllm_config=like("vllm.config:VllmConfig", model_config=model))
    llm = like("vllm.entrypoints.llm:LLM", llm_engine=engine)
    monkeypatch.setattr(scoring, "eos_tokens", lambda engine: frozenset({1}))
    arms = peer_arms.chosen(None, []).arms
    found = {name for name, arm in arms.items() if Prefixes.of(llm, arm.rollspec) is not None}
    assert found == {"spec_rl"} == {name for name, peer in PEERS.items() if peer.lossy}


def test_prefixes_come_from_the_same_place_of_the_last_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Reuse:
        def remember(self, items: list[Any], version: int) -> None:
            asked.append([(sample, tokens) for _, sample, tokens, _ in items])

    def keep_two(llm: Any, reuse: Any, rollouts: list[Any], params: Any) -> list[Any]:
        assert params["ignore_eos"]
        known = {sample for sample, _ in asked[-1]}
        return [SimpleNamespace(tokens=[1, 2], logprobs=[-1.0, -2.0]) if s in known else None for _, _, s in rollouts]

    monkeypatch.setattr(two_policies, "prefixes", keep_two)
    found, prompts = Prefixes(Reuse()), [[9], [9]]
    assert found.take(None, prompts, [3, 2]) == [[], []] and asked[-1] == []
    assert found.remember(prompts, [[1, 2, 3], [4, 5]]) == {"kept": 0, "ruled": [0, 0], "texts": [[1, 2, 3], [4, 5]]}
    assert found.take(None, prompts, [2, 2]) == [[1, 2], [1, 2]]
    assert asked[-1] == [("0", [1, 2]), ("1", [4, 5])]  # cut to what the new response may have
    assert found.remember(prompts, [[1, 2], [1, 2]])["kept"] == 4
    assert found.take(None, [[8]], [3]) == [[]]  # another prompt
