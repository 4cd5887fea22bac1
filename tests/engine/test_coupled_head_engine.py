"""Coupled sampling with drafts of a head, alone and beside suffix drafts, swapped while requests run: the same tokens,
more of them drafted.

float32 and temperature 1, so every comparison is token identity over the whole text.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import ALWAYS, build, call, close, generate, metric
from heads import random_head
from models import moved
from switching import COUPLED, QUIET, any_arm_and_passes

pytestmark = pytest.mark.engine

LONG = {"ignore_eos": True, "temperature": 1.0}
CUT = LONG | {"top_k": 6, "temperature": 0.8}


@pytest.fixture(scope="module")
def reference(model: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """The engine without any draft."""
    llm = build(model, QUIET)
    try:
        out = {}
        for version, params in enumerate((LONG, LONG, CUT)):
            call(llm, "set_version", version=version)
            out[version] = generate(llm, prompts, **params)
        return out
    finally:
        close(llm)


def step_by_step(llm: Any, prompts: list[list[int]], act: Callable[[int], None], **params: Any) -> list[list[int]]:
    """As `generate`, with `act(steps so far)` before every engine step."""
    from vllm import SamplingParams

    core = llm.llm_engine
    requests = [p for p in prompts for _ in range(2)]
    for i, prompt in enumerate(requests):
        sampling = SamplingParams(max_tokens=160 - 7 * (i % 5), detokenize=False, **params)
        core.add_request(f"s-{i}", {"prompt_token_ids": prompt}, sampling)
    done: dict[int, list[int]] = {}
    steps = 0
    while core.has_unfinished_requests():
        act(steps)
        for out in core.step():
            if out.finished:
                done[int(out.request_id.split("-")[1])] = list(out.outputs[0].token_ids)
        steps += 1
    return [done[i] for i in range(len(requests))]


def rate(llm: Any) -> float:
    """Accepted over drafted since the last call."""
    stats = call(llm, "stats")
    assert not stats["faults"], stats["faults"]
    return float(stats["accepted"] / max(1, stats["drafted"]))


@pytest.mark.parametrize("drafts", ["noise", pytest.param("greedy", marks=pytest.mark.slow)])
def test_a_draft_model_with_and_without_the_noise(
    model: Path,
    prompts: list[list[int]],
    reference: dict[str, Any],
    tmp_path: Path,
    drafts: str,
) -> None:
    """Swapped in mid-request: first a moved copy of the target, then the target itself, then the copy again."""
    copy = moved(model, tmp_path / "copy", 0.1)
    config = COUPLED | {"proposal.drafters": ["draft_model"], "proposal.head.model": str(copy), **ALWAYS}
    few = {"proposal.head.k_max": 4, "proposal.head.canary_drafts": 0}  # so that the last swap comes in mid-request
    llm = build(model, config | few | {"coupled.drafts": drafts})
    try:
        found = {}
        call(llm, "set_version", version=0)
        assert generate(llm, prompts, **LONG) == reference[0]
        found["copy"] = rate(llm)
        answers: list[dict[str, Any]] = []

        def swap(steps: int) -> None:
            if steps in (7, 30):
                folder = model if steps == 7 else copy
                answers.append(call(llm, "swap", dir=str(folder), version=steps, wait=True))

        call(llm, "set_version", version=1)
        assert step_by_step(llm, prompts, swap, **LONG) == reference[1]
        assert [("error" in a, a.get("version")) for a in answers] == [(False, 7), (False, 30)]
        rate(llm)
        assert "error" not in call(llm, "swap", dir=str(model), version=40, wait=True)
        call(llm, "set_version", version=2)
        assert generate(llm, prompts, **CUT) == reference[2]
        found["target"] = rate(llm)
        if drafts == "noise":
            assert found["target"] > 0.97 and found["copy"] > 0.5, found
        else:
            assert found["target"] < 0.9, found
    finally:
        close(llm)


def test_a_head_and_suffix_drafts_under_any_switch(
    model: Path, prompts: list[list[int]], reference: dict[str, Any], tmp_path: Path
) -> None:
    """Random arms and passes, prompts in chunks, preemption, and weights swapped every few steps."""
    heads = [random_head(tmp_path / f"head{i}", model, seed=i) for i in range(3)]
    config = COUPLED | {"proposal.drafters": ["suffix", "eagle3"], "proposal.head.model": str(heads[0]), **ALWAYS}
    tight = {"max_num_batched_tokens": 64, "enable_chunked_prefill": True, "num_gpu_blocks_override": 14}
    llm = build(model, config | {"proposal.head.canary_drafts": 0}, **tight)
    try:
        llm.collective_rpc(any_arm_and_passes)
        swapped: list[dict[str, Any]] = []

        def swap(steps: int) -> None:
            if steps % 40 == 11:
                number = len(swapped) + 1
                swapped.append(call(llm, "swap", dir=str(heads[number % 3]), version=number, wait=True))

        for version in range(2):
            call(llm, "set_version", version=version)
            assert step_by_step(llm, prompts, swap, **LONG) == reference[version]
        assert len(swapped) >= 4 and not any("error" in a for a in swapped), swapped
        stats = call(llm, "stats")
        assert not stats["faults"] and stats["by_source"]["eagle3"][1] > 0 and stats["accepted"] > 0
        assert metric(llm, "num_preemptions") > 0, "the cache was meant to be too small"
    finally:
        close(llm)
