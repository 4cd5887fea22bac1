"""The tuner in a real vLLM engine: whatever it decides, what is sampled stays the same.

float32 and greedy, so every comparison is token identity.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from engines import bridge, build, call, close, generate

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def reference(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What the engine says without rollspec."""
    llm = build(model)
    try:
        return generate(llm, prompts)
    finally:
        close(llm)


def _wild(worker: Any) -> None:
    """Any arm at any step, budgets included: far more switches than a policy would make."""
    import random

    rng = random.Random(0)
    tuner = bridge(worker).proposer.tuner
    tuner.policy.choose = lambda bucket: rng.randrange(len(tuner.arms))


def _garbage(worker: Any) -> None:
    import random

    from rollspec.proposal.base import Draft

    rng = random.Random(0)
    proposer = bridge(worker).proposer
    vocabulary = worker.model_runner.model_config.get_vocab_size()

    def draft(groups: Any, contexts: Any, rooms: list[int]) -> list[Draft]:
        return [Draft([rng.randrange(vocabulary) for _ in range(k)], [0.99] * k, "group", 16) for k in rooms]

    proposer.suffix.draft = draft
    proposer.tuner.guard.patience = 20  # the texts are short


def test_tokens_are_identical_under_any_switch_and_any_pressure(
    model: Path, prompts: list[list[int]], tmp_path: Path
) -> None:
    """Random arms every step, prompts computed in chunks, and a KV cache so small that requests are preempted."""
    tight = {"max_num_batched_tokens": 160, "enable_chunked_prefill": True, "num_gpu_blocks_override": 8}
    long = {"ignore_eos": True}  # every request then outgrows its first block of 128 tokens
    plain = build(model)
    try:
        expected = generate(plain, prompts, **long)
    finally:
        close(plain)
    llm = build(model, {"preset": "default", "history.dir": str(tmp_path)}, **tight)
    try:
        llm.collective_rpc(_wild)
        for version in range(2):
            call(llm, "set_version", version=version)
            assert generate(llm, prompts, **long) == expected
        stats = call(llm, "stats")
        assert len(stats["plays"]) == 6 and not stats["faults"]
        assert stats["accepted"] > 0 and stats["steps"] > stats["plays"]["none"] > 0
        preempted = [m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions"]
        assert preempted and preempted[0] > 0, "the cache was meant to be too small"
    finally:
        close(llm)


def test_what_was_learned_is_saved_and_reported(
    model: Path, prompts: list[list[int]], reference: list[list[int]], tmp_path: Path
) -> None:
    from rollspec.telemetry.metrics import EngineStats, to_metrics

    llm = build(model, {"preset": "default", "history.dir": str(tmp_path)})
    try:
        for version in range(3):
            call(llm, "set_version", version=version)
            assert generate(llm, prompts) == reference
        generate(llm, prompts, copies=2, temperature=1.0)
        stats = call(llm, "stats")
        m = to_metrics(EngineStats.from_dict(stats))
        # What times say on a busy machine is not judged here, only that they were turned into these figures.
        assert m["rollspec/rollout/speedup"] > 0.0
        assert m["rollspec/rollout/speedup_clairvoyant"] >= m["rollspec/rollout/speedup"] - 1e-9
        assert m["rollspec/rollout/speedup_perfect"] > 0.0
        assert -1.0 < m["rollspec/tuner/regret"] < 1.0
        assert 0.0 < m["rollspec/accept/ceiling"] <= 1.0
        assert m["rollspec/tuner/cost_error"] > 0.0
        assert call(llm, "info")["cost"]["fitted"]
        call(llm, "save", dir=str(tmp_path))
    finally:
        close(llm)
    assert (tmp_path / "tuning.json").is_file()
    again = build(model, {"preset": "default", "history.dir": str(tmp_path)})
    try:
        assert call(again, "info")["cost"]["fitted"], "the stored fit was not taken"
        assert generate(again, prompts) == reference
        (tmp_path / "tuning.json").write_text("{")
        answer = call(again, "load", dir=str(tmp_path))
        assert answer["responses"] > 0 and "is refused" in answer["tuning"]
        assert any("tuning" in cause for cause in call(again, "stats")["faults"])
    finally:
        close(again)


def test_a_garbage_drafter_is_switched_off_and_changes_nothing(
    model: Path, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    off = {"tuning.policy": "static", "proposal.budget.policy": "fixed"}
    llm = build(model, {"preset": "default", **off})
    try:
        llm.collective_rpc(_garbage)
        for _ in range(2):
            assert generate(llm, prompts) == reference
        stats = call(llm, "stats")
        assert stats["alarms"] >= 1 and stats["drafters_off"]
        assert stats["plays"]["none"] > 0.3 * stats["steps"]
    finally:
        close(llm)


@pytest.mark.parametrize("policy", ["ucbspec", "exp3spec", "beg_mab", "thompson", "table"])
def test_published_policies_run_and_change_nothing(
    model: Path, prompts: list[list[int]], reference: list[list[int]], policy: str
) -> None:
    options = {"table": {"4": 8, "16": 2}} if policy == "table" else {}
    llm = build(model, {"preset": "default", "tuning": {"policy": policy, "options": options}})
    try:
        for version in range(2):
            call(llm, "set_version", version=version)
            assert generate(llm, prompts) == reference
        stats = call(llm, "stats")
        assert not stats["faults"] and stats["accepted"] > 0
    finally:
        close(llm)


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores")
def test_ranks_agree(model: Path, prompts: list[list[int]]) -> None:
    """Two tensor-parallel ranks: only one decides, and the other verifies what the scheduler sends."""
    plain = build(model, tensor_parallel_size=2)
    try:
        expected = generate(plain, prompts)
    finally:
        close(plain)
    llm = build(model, "default", tensor_parallel_size=2)
    try:
        for version in range(2):
            call(llm, "set_version", version=version)
            assert generate(llm, prompts) == expected
        states = llm.collective_rpc("rollspec", args=("stats", {}))
        assert len([s for s in states if s]) == 1 and len(states) == 2
        assert next(s for s in states if s)["accepted"] > 0
    finally:
        close(llm)
