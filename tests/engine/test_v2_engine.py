"""A thread that drafts, as on a GPU; seeds; and faults of verification. float32: comparisons are token identity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import bridge, build, call, close, generate, metric

pytestmark = pytest.mark.engine

COUPLED = {"preset": "default", "mode": "coupled", "coupled.seed": 7}
LONG = {"ignore_eos": True, "temperature": 1.0, "limit": 80}
ALL_AT_ONCE: list[dict[str, Any]] = [
    {"allowed_token_ids": list(range(16, 120))},
    {"top_k": 5, "repetition_penalty": 1.2, "seed": 3},
]


def _draft_on_a_thread(worker: Any) -> None:
    """As on a GPU, where the tokens of a step are not on the host when drafts are proposed."""
    from concurrent.futures import ThreadPoolExecutor

    bridge(worker).join.__self__._thread = ThreadPoolExecutor(1)


def _break_verification(worker: Any) -> None:
    from rollspec.engine.vllm.v2 import verify

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("the kernel was not launched")

    verify.verify = broken


def _break_keys(worker: Any) -> None:
    bridge(worker).coupled.streams.keys = None


@pytest.fixture(scope="module")
def quiet(model: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """Coupled sampling without any draft."""
    llm = None
    try:
        llm = build(model, COUPLED | {"proposal.drafters": []})
        call(llm, "set_version", version=9)
        out = {"greedy": generate(llm, prompts, limit=80)}
        for version in range(2):
            call(llm, "set_version", version=version)
            out[f"version {version}"] = generate(llm, prompts, **LONG)
        for params in ALL_AT_ONCE:
            call(llm, "set_version", version=2)
            out[str(params)] = generate(llm, prompts[:3], **LONG | params)
            call(llm, "set_version", version=3)
        return out
    finally:
        if llm is not None:
            close(llm)


@pytest.mark.parametrize("thread", [False, True])
def test_drafts_change_no_token(model: Path, prompts: list[list[int]], quiet: dict[str, Any], thread: bool) -> None:
    llm = build(model, COUPLED)
    try:
        config = llm.llm_engine.vllm_config
        assert config.use_v2_model_runner and config.scheduler_config.async_scheduling
        if thread:
            llm.collective_rpc(_draft_on_a_thread)
        call(llm, "set_version", version=9)
        assert generate(llm, prompts, limit=80) == quiet["greedy"]
        for version in (0, 1, 0):
            call(llm, "set_version", version=version)
            assert generate(llm, prompts, **LONG) == quiet[f"version {version}"]
        for params in ALL_AT_ONCE:
            call(llm, "set_version", version=2)
            assert generate(llm, prompts[:3], **LONG | params) == quiet[str(params)], params
            call(llm, "set_version", version=3)
        stats = call(llm, "stats")
        assert stats["drafted"] > stats["accepted"] > 0 and not stats["faults"]
        assert metric(llm, "spec_decode_num_draft_tokens") == stats["drafted"]
        assert metric(llm, "spec_decode_num_accepted_tokens") >= stats["accepted"]
    finally:
        close(llm)


def test_a_seed_is_one_text_in_standard_mode(model: Path, prompts: list[list[int]]) -> None:
    llm = build(model, {"preset": "default"})
    try:
        said = [generate(llm, prompts[:2], copies=1, seed=5, **LONG) for _ in range(3)]
        assert said[0] == said[1] == said[2]
        assert call(llm, "stats")["accepted"] > 0
        free = [generate(llm, prompts[:2], copies=1, **LONG) for _ in range(2)]
        assert free[0] != free[1]
    finally:
        close(llm)


def test_a_fault_leaves_verification_to_vllm(model: Path, prompts: list[list[int]]) -> None:
    """No request ends, the step follows the policy, and the engine says how it samples from then on."""
    for fault, cause in ((_break_verification, "the kernel was not launched"), (_break_keys, "TypeError")):
        llm = build(model, COUPLED | {"proposal.budget.policy": "fixed", "tuning.policy": "static"})
        # One token is left to draw, found through everything that changes logits.
        certain = {"top_k": 1, "repetition_penalty": 1.3, "ignore_eos": True, "limit": 60, "temperature": 0.7}
        try:
            expected = generate(llm, prompts[:3], **certain)
            call(llm, "stats")
            assert call(llm, "info")["mode"] == "coupled"
            llm.collective_rpc(fault)
            assert generate(llm, prompts[:3], **certain) == expected
            stats = call(llm, "stats")
            ((found, times),) = stats["faults"].items()
            assert found.startswith("coupled sampling: ") and cause in found and times == 1
            info = call(llm, "info")
            assert info["mode"] == "standard" and info["state"] == "suffix" and stats["accepted"] > 0
        finally:
            close(llm)
