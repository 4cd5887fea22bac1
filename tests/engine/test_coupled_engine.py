"""Coupled sampling in a real vLLM engine at temperature 1: the same tokens, whatever is drafted, however it is batched.

float32, so every comparison is token identity, over the whole text.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
from engines import CACHING, bridge, build, call, close, generate, metric
from switching import COUPLED, GRAMMAR, QUIET, any_arm

pytestmark = pytest.mark.engine

LONG = {"ignore_eos": True, "temperature": 1.0}
GRAMMARS = 6
"""Policy versions under which requests with a grammar leave the batch, each at other steps, and what they said is
drafted. `test_storm_engine.py` mixes grammars with everything else, and its sweep is long in `make test-slow`.
"""


PROCESSED: list[dict[str, Any]] = [
    {"top_k": 5, "top_p": 0.8},
    {"temperature": 0.7, "top_p": 0.9},
    {"repetition_penalty": 1.2, "presence_penalty": 0.3},
    *({"min_tokens": n, "ignore_eos": False} for n in (20, 31, 43, 50)),
    {"logprobs": 2},
    {"seed": 11},
    {"allowed_token_ids": list(range(16, 120))},
    {"bad_words": ["2", "+"]},
    {"top_k": 5, "repetition_penalty": 1.2, "seed": 3},
]


def one_more(prompts: list[list[int]]) -> list[list[int]]:
    """Prompts of whole blocks and one token."""
    return [(p * 3)[: 2 * CACHING["block_size"] + 1] for p in prompts]


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
    guided = {"structured_outputs": StructuredOutputsParams(regex=GRAMMAR), "temperature": 1.0}
    for version in range(4, 4 + GRAMMARS):
        call(llm, "set_version", version=version)
        out[f"grammar {version}"] = generate(llm, prompts[:3], limit=80, **guided)
    return out


@pytest.fixture(scope="module")
def reference(model: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """The engine without any draft, in wide batches and without a prefix cache."""
    llm = build(model, QUIET)
    try:
        info = call(llm, "info")
        assert info["mode"] == "coupled" and info["state"] == "none"
        out = _everything(llm, prompts)
        for version in range(2):
            call(llm, "set_version", version=100)  # so that the next one begins anew
            call(llm, "set_version", version=version)
            out[f"one more {version}"] = generate(llm, one_more(prompts), copies=3, limit=60, **LONG)
        stats = call(llm, "stats")
        assert stats["drafted"] == 0 and not stats["faults"]
        return out
    finally:
        close(llm)


@pytest.fixture(scope="module")
def shared(model: Path, plain: dict[str, Any], reference: dict[str, Any]) -> Any:
    """An engine that drafts, for tests that need no other. It starts last: a process has the counters of one engine."""
    llm = build(model, COUPLED)
    yield llm
    close(llm)


@pytest.fixture
def llm(shared: Any) -> Any:
    """The same, before anything was counted or said under the versions of a test."""
    call(shared, "set_version", version=100)
    call(shared, "stats")
    shared.counted = {name: metric(shared, name) for name in COUNTED}
    yield shared
    shared.collective_rpc(_draft_on_a_thread, args=(False,))


COUNTED = ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")


def _agree(llm: Any, stats: dict[str, Any]) -> None:
    """vLLM's own counters and rollspec's, of one test."""
    drafted, accepted = (metric(llm, name) - llm.counted[name] for name in COUNTED)
    assert drafted == stats["drafted"] and accepted >= stats["accepted"]


def _draft_on_a_thread(worker: Any, on: bool) -> None:
    """As on a GPU, where the tokens of a step are not on the host when drafts are proposed."""
    from concurrent.futures import ThreadPoolExecutor

    bridge(worker).join.__self__._thread = ThreadPoolExecutor(1) if on else None


def test_greedy_requests_stay_greedy(llm: Any, prompts: list[list[int]], plain: dict[str, Any]) -> None:
    """Beside sampled ones in the same batch, and alone."""
    from vllm import SamplingParams

    expected = [text[: 80 - 7 * (i % 5)] for i, text in enumerate(plain["greedy"][::2])]
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


def test_a_thread_that_drafts_changes_no_token(
    llm: Any, prompts: list[list[int]], reference: dict[str, Any], plain: dict[str, Any]
) -> None:
    llm.collective_rpc(_draft_on_a_thread, args=(True,))
    call(llm, "set_version", version=9)
    assert generate(llm, prompts) == plain["greedy"]
    for version in (0, 1, 0):
        call(llm, "set_version", version=version)
        assert generate(llm, prompts, **LONG) == reference[f"version {version}"]
    for params in (PROCESSED[-3], PROCESSED[-1]):
        call(llm, "set_version", version=2)
        assert generate(llm, prompts[:3], limit=80, **LONG | params) == reference[str(params)], params
        call(llm, "set_version", version=3)
    stats = call(llm, "stats")
    assert stats["drafted"] > stats["accepted"] > 0 and not stats["faults"]
    _agree(llm, stats)


def test_drafts_arms_and_processors_change_no_token(
    llm: Any, prompts: list[list[int]], reference: dict[str, Any]
) -> None:
    config = llm.llm_engine.vllm_config
    assert config.use_v2_model_runner and config.scheduler_config.async_scheduling
    llm.collective_rpc(any_arm)
    said = _everything(llm, prompts)
    for name, expected in said.items():
        assert expected == reference[name], name
    assert len(said) == 2 + len(PROCESSED) + GRAMMARS
    stats = call(llm, "stats")
    assert stats["accepted"] > 0 and stats["drafted"] > stats["accepted"] and not stats["faults"]
    assert len(stats["plays"]) == 6
    _agree(llm, stats)
    assert said["version 0"] != said["version 1"], "noise did not change with the policy version"
    pairs = list(zip(said["version 0"][::2], said["version 0"][1::2], strict=True))
    assert sum(a[: len(b)] == b[: len(a)] for a, b in pairs) < len(pairs) / 2, "siblings share noise"


@pytest.mark.parametrize("cache", [{"num_gpu_blocks_override": 8}, CACHING | {"num_gpu_blocks_override": 32}])
def test_batches_chunks_and_preemption_change_no_token(
    model: Path, prompts: list[list[int]], reference: dict[str, Any], cache: dict[str, Any]
) -> None:
    """Few requests at a time, prompts computed in chunks, and a KV cache so small that requests start over; what they
    computed before is found again where prefixes are cached.
    """
    llm = build(model, COUPLED, max_num_batched_tokens=160, enable_chunked_prefill=True, **cache)
    try:
        llm.collective_rpc(any_arm)
        for version in range(2):
            call(llm, "set_version", version=version)
            assert generate(llm, prompts, **LONG) == reference[f"version {version}"]
        assert metric(llm, "num_preemptions") > 0, "the cache was meant to be too small"
        assert (metric(llm, "prefix_cache_hits") > 0) == ("enable_prefix_caching" in cache)
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


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_prompt_that_is_cached_but_for_one_token_changes_no_token(
    model: Path, prompts: list[list[int]], reference: dict[str, Any], overlap: bool
) -> None:
    """vLLM schedules such a request, where it joins others, with padded draft slots."""
    llm = build(model, COUPLED, max_num_seqs=3, **CACHING, async_scheduling=None if overlap else False)
    try:
        for version in range(2):
            call(llm, "set_version", version=version)
            assert generate(llm, one_more(prompts), copies=3, limit=60, **LONG) == reference[f"one more {version}"]
        stats = call(llm, "stats")
        assert not stats["faults"] and stats["accepted"] > 0
        assert metric(llm, "prefix_cache_hits") > 0
    finally:
        close(llm)


def _log_probs(llm: Any, prompts: list[list[int]], **params: Any) -> tuple[list[list[int]], list[list[float]]]:
    from vllm import SamplingParams

    requests = [{"prompt_token_ids": p} for p in prompts for _ in range(2)]
    sampling = SamplingParams(detokenize=False, max_tokens=60, logprobs=0, **LONG | params)
    outputs = [o.outputs[0] for o in llm.generate(requests, sampling, use_tqdm=False)]
    return (
        [list(o.token_ids) for o in outputs],
        [[d[t].logprob for d, t in zip(o.logprobs, o.token_ids, strict=True)] for o in outputs],
    )


@pytest.mark.parametrize("mode", [pytest.param("raw_logprobs", marks=pytest.mark.slow), "processed_logprobs"])
def test_log_probs_are_the_policys(model: Path, prompts: list[list[int]], mode: str) -> None:
    """With drafts, without, and by transformers, which knows of neither."""
    import numpy as np
    import torch

    from rollspec.audit.reference import Reference

    distributions = ({"top_k": 4}, {"top_k": 20, "temperature": 0.7})
    found = []
    for config in (QUIET, COUPLED):
        llm = build(model, config, logprobs_mode=mode)
        try:
            if config is COUPLED:
                llm.collective_rpc(any_arm)
            call(llm, "set_version", version=1)
            found.append([_log_probs(llm, prompts[:4], **distribution) for distribution in distributions])
            stats = call(llm, "stats")
            assert not stats["faults"] and (stats["drafted"] > stats["accepted"] > 0) == (config is COUPLED)
        finally:
            close(llm)
    target = Reference(model, 1.0)
    for distribution, (texts, quiet), (drafted_texts, drafted) in zip(distributions, *found, strict=True):
        assert drafted_texts == texts
        for i, text in enumerate(texts):
            scores = torch.from_numpy(target.log_probs(prompts[i // 2], text))
            if mode == "processed_logprobs":
                scores = scores / distribution.get("temperature", 1.0)
                least = scores.topk(distribution["top_k"]).values[:, -1:]
                scores = scores.masked_fill(scores < least, -torch.inf).log_softmax(-1)
            expected = scores.gather(-1, torch.tensor(text)[:, None])[:, 0].numpy()
            assert np.abs(np.array(drafted[i]) - np.array(quiet[i])).max() < 1e-4
            assert np.abs(np.array(drafted[i]) - expected).max() < 1e-4


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


def _break_verification(worker: Any) -> None:
    from rollspec.engine.vllm.v2 import verify

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("the kernel was not launched")

    verify.verify = broken


def _break_keys(worker: Any) -> None:
    bridge(worker).coupled.streams.keys = None


def test_a_fault_leaves_verification_to_vllm(model: Path, prompts: list[list[int]]) -> None:
    """No request ends, the step follows the policy, and the engine says how it samples from then on."""
    # One token is left to draw, found through everything that changes logits.
    certain = {"top_k": 1, "repetition_penalty": 1.3, "ignore_eos": True, "temperature": 0.7}
    faults = ((_break_verification, "the kernel was not launched"), (_break_keys, "TypeError"))
    for (fault, cause), params in itertools.product(faults, (certain, LONG)):
        llm = build(model, COUPLED | {"proposal.budget.rule": "fixed", "tuning.strategy": "static"})
        try:
            expected = generate(llm, prompts[:3], limit=60, **params)
            call(llm, "stats")
            assert call(llm, "info")["mode"] == "coupled"
            llm.collective_rpc(fault)
            said = generate(llm, prompts[:3], limit=60, **params)
            assert [len(text) for text in said] == [len(text) for text in expected]
            assert said == expected or params is LONG
            stats = call(llm, "stats")
            ((found, times),) = stats["faults"].items()
            assert found.startswith("coupled sampling: ") and cause in found and times == 1
            info = call(llm, "info")
            assert info["mode"] == "standard" and info["state"] == "suffix" and stats["accepted"] > 0
        finally:
            close(llm)
