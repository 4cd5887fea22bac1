"""Coupled sampling at the borders of batches: requests of all kinds that come, wait, and leave at any step.

The same requests in the same order, once without drafts, in a wide batch and without a prefix cache, and once with
drafts of any length in a narrow one: prompts in chunks and from the cache, also all but their last token.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from engines import CACHING, build, call, close, metric
from switching import COUPLED, GRAMMAR, QUIET, any_arm, begun_ahead, on_a_thread

from benchmarks.gpu.storm import chosen, parameters, serve

pytestmark = pytest.mark.engine

REQUESTS = 50
GRAMMARS = (GRAMMAR, "[0-9]{3,9}=[0-9]+", "([0-9]+[+]){1,9}[0-9]{1,4}")
TIGHT = CACHING | {"max_num_seqs": 6, "max_num_batched_tokens": 160, "enable_chunked_prefill": True}


def requests(rng: random.Random, prompts: list[list[int]]) -> list[tuple[list[int], Any]]:
    """Prompts, some of them a whole number of blocks and one token more, with any parameters; some have siblings."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    out: list[tuple[list[int], Any]] = []
    while len(out) < REQUESTS:
        length = rng.choice([None, 32, 33, 40, 64, 65, 97])
        prompt = (rng.choice(prompts) * 4)[:length]
        given, some = parameters(rng)
        some |= {
            "bad_words": ["2", "+"],
            "allowed_token_ids": list(range(16, 120)),
            "seed": rng.randrange(4),
            "structured_outputs": StructuredOutputsParams(regex=rng.choice(GRAMMARS)),
        }
        given |= chosen(rng, some)
        if "structured_outputs" in given:
            given.pop("bad_words", None)
        out += [(prompt, SamplingParams(**given)) for _ in range(rng.choice([1, 1, 2, 4]))]
    return out[:REQUESTS]


def storm(llm: Any, seed: int, prompts: list[list[int]]) -> list[tuple[list[int], str]]:
    """(tokens, why it ended) of every request."""
    rng = random.Random(seed)
    return [(list(s.token_ids), s.finish_reason) for s in serve(llm, rng, requests(rng, prompts), str(seed))]


@pytest.mark.parametrize("rounds", [4, pytest.param(24, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_no_token_depends_on_the_storm(model: Path, prompts: list[list[int]], rounds: int) -> None:
    said: list[list[Any]] = []
    for config, engine, switch in (
        (QUIET, {"max_num_seqs": 64}, None),
        (COUPLED, TIGHT, any_arm),
        (COUPLED, TIGHT, on_a_thread),
    ):
        llm = build(model, config, **engine)
        try:
            if switch is not None:
                llm.collective_rpc(switch)
            said.append([])
            for i in range(rounds):
                call(llm, "set_version", version=i // 2)
                said[-1].append(storm(llm, i, prompts))
            stats = call(llm, "stats")
            assert not stats["faults"], stats["faults"]
            assert (stats["drafted"] > stats["accepted"] > 0) == (config is COUPLED)
            assert (metric(llm, "prefix_cache_hits") > 0) == (config is COUPLED)
            if switch is on_a_thread:
                assert llm.collective_rpc(begun_ahead)[0] > 0
        finally:
            close(llm)
    for i, (quiet, *drafted) in enumerate(zip(*said, strict=True)):
        assert len(quiet) == REQUESTS
        for found in drafted:
            parted = [j for j, (a, b) in enumerate(zip(quiet, found, strict=True)) if a != b]
            assert not parted, (i, [(requests(random.Random(i), prompts)[j], quiet[j], found[j]) for j in parted[:3]])
