"""Drafts of models in a real vLLM engine, alone and beside suffix drafts: what is sampled does not change.

float32 and greedy, so every comparison is token identity. A draft model that is the target itself is always accepted; a
head with random weights is nearly always rejected: between them every number of accepted tokens occurs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from engines import ALWAYS, CACHING, bridge, build, call, close, generate, metric
from heads import random_head
from switching import any_arm_and_passes

pytestmark = pytest.mark.engine

TIGHT = {"max_num_batched_tokens": 160, "enable_chunked_prefill": True, **CACHING, "num_gpu_blocks_override": 48}


@pytest.fixture(scope="module")
def head(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_head(tmp_path_factory.mktemp("head"), model)


def _info(worker: Any) -> dict[str, Any]:
    from rollspec.engine.vllm.v2.install import bridge

    d = bridge(worker).head
    return {"off": d.off, "late": d.caught_up, "kept": d.drafter_kv.bytes, "entries": len(d.drafter_kv)}


def test_a_perfect_draft_model_beside_suffix_drafts(
    model: Path, prompts: list[list[int]], plain: dict[str, Any]
) -> None:
    config = {"proposal.drafters": ["suffix", "draft_model"], "proposal.head.model": str(model), **ALWAYS}
    llm = build(model, config)
    try:
        assert call(llm, "info")["state"] == "suffix+draft_model"
        assert generate(llm, prompts) == plain["greedy"]
        stats = call(llm, "stats")
        assert not stats["faults"] and stats["passes"] > 0
        # How often it drafts depends on what its passes take here; where that is little, the few drafts that reach past
        # an end weigh more.
        _, drafted, accepted = stats["by_source"]["draft_model"]
        assert accepted > 0.9 * drafted > 0
        assert generate(llm, prompts[:4], copies=1, limit=256, ignore_eos=True) == plain["limit"]
        llm.collective_rpc(any_arm_and_passes)
        for version in range(2):
            call(llm, "set_version", version=version)
            assert generate(llm, prompts) == plain["greedy"]
        stats = call(llm, "stats")
        assert not stats["faults"] and len(stats["by_source"]) >= 2
        head = llm.collective_rpc(_info)[0]
        assert head["late"] > 0 and not head["off"], "it never caught up after a pause"
        # Its KV was whole after every pause, or it would have been wrong.
        _, drafted, accepted = stats["by_source"]["draft_model"]
        assert accepted > 0.9 * drafted > 0
    finally:
        close(llm)


@pytest.mark.supports("vLLM", "any program", "draft head")
def test_a_head_alone_and_beside_suffix_drafts_under_any_switch(
    model: Path, head: Path, prompts: list[list[int]], plain: dict[str, Any]
) -> None:
    """Preemption, prompts in chunks and from the cache, staggered ends, random arms and passes."""
    config = {"proposal.drafters": ["suffix", "eagle3"], "proposal.head.model": str(head), **ALWAYS}
    llm = build(model, config, **TIGHT)
    try:
        llm.collective_rpc(any_arm_and_passes)
        for version in range(2):
            call(llm, "set_version", version=version)
            assert generate(llm, prompts, ignore_eos=True) == plain["long"]
        stats = call(llm, "stats")
        assert not stats["faults"]
        assert stats["by_source"]["eagle3"][1] > 0 and stats["by_source"]["group"][1] > 0
        assert metric(llm, "num_preemptions") > 0, "the cache was meant to be too small"
        two_blocks = (prompts[0] * 9)[: 2 * CACHING["block_size"] + 1]
        first, found = generate(llm, [two_blocks], copies=1), metric(llm, "prefix_cache_hits")
        assert generate(llm, [two_blocks], copies=1) == first
        assert metric(llm, "prefix_cache_hits") - found == 2 * CACHING["block_size"], "a cached block is computed again"
        head = llm.collective_rpc(_info)[0]
        assert head["late"] > 0 and not head["off"] and head["entries"] <= 1
    finally:
        close(llm)


def test_a_useless_head_alone_rests(model: Path, head: Path, prompts: list[list[int]], plain: dict[str, Any]) -> None:
    llm = build(model, {"proposal.drafters": ["eagle3"], "proposal.head.model": str(head)})
    try:
        for _ in range(3):
            assert generate(llm, prompts) == plain["greedy"]
        stats = call(llm, "stats")
        assert not stats["faults"] and stats["passes"] < stats["steps"]
        call(llm, "stats")
        llm.collective_rpc(_break)
        assert generate(llm, prompts) == plain["greedy"]
        assert any("planted" in cause for cause in call(llm, "stats")["faults"])
        assert call(llm, "info")["state"] == "none"
    finally:
        close(llm)


def _track(worker: Any) -> None:
    """Note the drafter's version at every step, on this rank."""
    runner = worker.model_runner
    head = runner._rollspec.head
    worker._versions = []
    propose = head.drafter.propose

    def noted(*args: Any, **kwargs: Any) -> Any:
        worker._versions.append((head.swapper.version, float(head.drafter.model.model.norm.weight.sum())))
        return propose(*args, **kwargs)

    head.drafter.propose = noted


def _tracked(worker: Any) -> list[Any]:
    return list(worker._versions)


def _lose(worker: Any) -> None:
    """One rank loses its drafter's weights."""
    if worker.rank == 1:
        for p in bridge(worker).head.swapper.deployment.weights.own.values():
            p.data.zero_()


@pytest.mark.slow  # `test_tensor_parallel_ranks_draw_alike` and `test_two_ranks_agree` are its shorter siblings
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores")
def test_ranks_run_and_swap_the_drafter_together(
    model: Path, head: Path, prompts: list[list[int]], tmp_path: Path
) -> None:
    """Two tensor-parallel ranks: one decides how many passes, what is swapped in and what stays; both do it."""
    from safetensors.torch import load_file, save_file

    alone = build(model, tensor_parallel_size=2)
    try:
        expected = generate(alone, prompts)
    finally:
        close(alone)
    config = {"proposal.drafters": ["suffix", "eagle3"], "proposal.head.model": str(head), **ALWAYS}
    config |= {"proposal.head.canary_drafts": 30, "drafter.mode": "capture"}
    config |= {"proposal.head.specialists": {"other": str(random_head(tmp_path / "other", model, seed=1))}}
    llm = build(model, config, tensor_parallel_size=2)
    try:
        llm.collective_rpc(any_arm_and_passes)
        llm.collective_rpc(_track)
        assert generate(llm, prompts) == expected
        states = llm.collective_rpc("rollspec", args=("stats", {}))
        assert len(states) == 2 and len([s for s in states if s]) == 1, "one decides, both verify"
        stats = next(s for s in states if s)
        assert stats["accepted"] > 0
        assert not stats["faults"] and stats["passes"] > 0 and stats["by_source"]["eagle3"][1] > 0
        weights = load_file(head / "model.safetensors")
        for number, factor in ((1, 0.9), (2, 1.1)):
            folder = tmp_path / f"v{number}"
            folder.mkdir()
            save_file({n: t * factor for n, t in weights.items()}, folder / "model.safetensors")
            answer = call(llm, "swap", dir=str(folder), version=number, canary=number == 2)
            assert answer.get("staging"), answer
            for _ in range(8):  # until as many drafts were made as the canary takes
                assert generate(llm, prompts) == expected
                info = call(llm, "info")["drafter"]
                if info["state"] == "settled":
                    break
            assert info["promoted"] + info["rolled_back"] == number and info["state"] == "settled", info
        bad = tmp_path / "bad"
        bad.mkdir()
        save_file({n: t for n, t in weights.items() if n != "fc.weight"}, bad / "model.safetensors")
        assert "fc.weight is missing" in call(llm, "swap", dir=str(bad), version=9, wait=True)["error"]
        llm.collective_rpc(_lose)
        call(llm, "set_version", version=1)
        assert call(llm, "info")["drafter"]["resent"] == 1
        assert generate(llm, prompts) == expected
        first, second = llm.collective_rpc(_tracked)
        assert first == second and len({v for v, _ in first}) >= 2, "the ranks swapped at different steps"
        assert not call(llm, "stats")["faults"]
    finally:
        close(llm)


def _break(worker: Any) -> None:
    from rollspec.engine.vllm.v2.install import bridge

    head = bridge(worker).head
    bridge(worker).engine.head.since = 10**6  # it runs at the next step

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("planted fault")

    head.drafter.propose = broken
