"""Coupled sampling in a real vLLM engine at temperature 1: the same tokens, whatever is drafted, however it is batched.

float32, so every comparison is token identity, over the whole text.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from engines import build, call, close, generate

pytestmark = pytest.mark.engine

COUPLED = {"preset": "default", "mode": "coupled", "coupled.seed": 7}
QUIET = COUPLED | {"proposal.drafters": []}
LONG = {"ignore_eos": True, "temperature": 1.0}


def _wild(worker: Any) -> None:
    """Any arm at any step, budgets included: far more switches than a policy would make."""
    import random

    rng = random.Random(0)
    tuner = worker.model_runner.drafter.proposer.tuner
    tuner.policy.choose = lambda bucket: rng.randrange(len(tuner.arms))


PROCESSED: list[dict[str, Any]] = [
    {"top_k": 5, "top_p": 0.8},
    {"temperature": 0.7, "top_p": 0.9},
    {"repetition_penalty": 1.2, "presence_penalty": 0.3},
    {"min_tokens": 20, "ignore_eos": False},
    {"logprobs": 2},
    {"seed": 11},
    {"allowed_token_ids": list(range(16, 120))},
    {"bad_words": ["2", "+"]},
]
GRAMMAR = "[0-9+= ]{10,70}"


def _everything(llm: Any, prompts: list[list[int]]) -> dict[str, Any]:
    """What an engine says under versions 0 and 1, with and without more sampling parameters."""
    from vllm.sampling_params import StructuredOutputsParams

    out: dict[str, Any] = {}
    for version in range(2):
        call(llm, "set_version", version=version)
        out[f"version {version}"] = generate(llm, prompts, **LONG)
    for params in PROCESSED:
        call(llm, "set_version", version=2)
        out[str(params)] = generate(llm, prompts[:3], limit=80, **LONG | params)
        call(llm, "set_version", version=3)
    call(llm, "set_version", version=4)
    guided = {"structured_outputs": StructuredOutputsParams(regex=GRAMMAR), "temperature": 1.0}
    out["grammar"] = generate(llm, prompts[:3], limit=80, **guided)
    return out


@pytest.fixture(scope="module")
def reference(model: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """The engine without any draft."""
    llm = build(model, QUIET)
    try:
        info = call(llm, "info")
        assert info["mode"] == "coupled" and info["state"] == "none"
        out = _everything(llm, prompts)
        stats = call(llm, "stats")
        assert stats["drafted"] == 0 and not stats["faults"]
        return out
    finally:
        close(llm)


def test_drafts_arms_and_processors_change_no_token(
    model: Path, prompts: list[list[int]], reference: dict[str, Any]
) -> None:
    llm = build(model, COUPLED)
    try:
        llm.collective_rpc(_wild)
        said = _everything(llm, prompts)
        for name, expected in reference.items():
            assert said[name] == expected, name
        stats = call(llm, "stats")
        assert stats["accepted"] > 0 and stats["drafted"] > stats["accepted"] and not stats["faults"]
        assert len(stats["plays"]) == 6
    finally:
        close(llm)
    assert said["version 0"] != said["version 1"], "noise did not change with the policy version"
    pairs = list(zip(said["version 0"][::2], said["version 0"][1::2], strict=True))
    assert sum(a[: len(b)] == b[: len(a)] for a, b in pairs) < len(pairs) / 2, "siblings share noise"


def test_batches_chunks_and_preemption_change_no_token(
    model: Path, prompts: list[list[int]], reference: dict[str, Any]
) -> None:
    """Few requests at a time, prompts computed in chunks, and a KV cache so small that requests start over."""
    tight = {"max_num_batched_tokens": 160, "enable_chunked_prefill": True, "num_gpu_blocks_override": 8}
    llm = build(model, COUPLED, **tight)
    try:
        llm.collective_rpc(_wild)
        for version in range(2):
            call(llm, "set_version", version=version)
            assert generate(llm, prompts, **LONG) == reference[f"version {version}"]
        preempted = [m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions"]
        assert preempted and preempted[0] > 0, "the cache was meant to be too small"
        assert call(llm, "stats")["accepted"] > 0
        # One request at a time, each alone in its batch.
        same = LONG | {"max_tokens": 60}
        call(llm, "set_version", version=7)
        alone = [generate(llm, [p], copies=1, **same) for p in prompts for _ in range(2)]
        call(llm, "set_version", version=8)
        call(llm, "set_version", version=7)
        assert [[text] for text in generate(llm, prompts, copies=2, **same)] == alone
    finally:
        close(llm)


def test_greedy_requests_stay_greedy(model: Path, prompts: list[list[int]]) -> None:
    """Beside sampled ones in the same batch, and alone."""
    from vllm import SamplingParams

    plain = build(model)
    try:
        expected = generate(plain, prompts, copies=1, limit=80)
    finally:
        close(plain)
    llm = build(model, COUPLED)
    try:
        requests = [{"prompt_token_ids": p} for p in prompts for _ in range(2)]
        for version in range(2):
            call(llm, "set_version", version=version)
            assert generate(llm, prompts, copies=1, limit=80) == expected
            mixed = [
                SamplingParams(detokenize=False, temperature=float(i % 2), max_tokens=80 - 7 * ((i // 2) % 5))
                for i in range(len(requests))
            ]
            outputs = llm.generate(requests, mixed, use_tqdm=False)
            assert [list(o.outputs[0].token_ids) for o in outputs[::2]] == expected
        assert call(llm, "stats")["accepted"] > 0
        with pytest.raises(Exception, match="min_p"):
            generate(llm, prompts[:1], copies=1, min_p=0.1, temperature=1.0)
        # A fault in the noise: the engine goes on by vLLM's own sampling, and says so.
        llm.collective_rpc(_break_noise)
        assert [len(t) for t in generate(llm, prompts, copies=1, limit=40, **LONG)] == [40, 33, 26, 19, 12, 40]
        assert call(llm, "info")["mode"] == "standard"
        assert any("coupled sampling" in cause for cause in call(llm, "stats")["faults"])
    finally:
        close(llm)


def _break_noise(worker: Any) -> None:
    worker.model_runner.drafter.coupled.streams.keys = None


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores")
def test_tensor_parallel_ranks_draw_alike(model: Path, prompts: list[list[int]]) -> None:
    """Each rank feeds itself what it drew: were their noise different, drafts would change the text."""
    llm = build(model, COUPLED, tensor_parallel_size=2)
    try:
        said = []
        for version in (0, 1, 0):  # the second time under version 0 with drafts from the first
            call(llm, "set_version", version=version)
            call(llm, "stats")
            said.append(generate(llm, prompts, limit=80, **LONG))
        assert said[0] == said[2] != said[1]
        stats = call(llm, "stats")
        assert stats["accepted"] > 0 and not stats["faults"]
    finally:
        close(llm)
