"""Requests of many kinds that arrive and leave at any step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any


def parameters(rng: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sampling parameters of a request, and more of which it has some (`chosen`)."""
    most = rng.randrange(1, 70)
    given: dict[str, Any] = {
        "max_tokens": most,
        "temperature": rng.choice([1.0, 1.0, 1.0, 0.7, 0.0]),
        "ignore_eos": rng.random() < 0.5,
        "detokenize": False,
    }
    some: dict[str, Any] = {
        "top_k": rng.randrange(1, 20),
        "top_p": rng.uniform(0.3, 1.0),
        "repetition_penalty": rng.uniform(1.0, 1.5),
        "presence_penalty": rng.uniform(0.0, 0.8),
        "frequency_penalty": rng.uniform(0.0, 0.8),
        "min_tokens": rng.randrange(most + 1),
        "stop_token_ids": rng.sample(range(26, 46), 2),
        "logprobs": rng.randrange(4),
    }
    return given, some


def chosen(rng: random.Random, some: dict[str, Any]) -> dict[str, Any]:
    """A fifth of the parameters."""
    return {name: value for name, value in some.items() if rng.random() < 0.2}


def requests(rng: random.Random, prompts: list[list[int]], count: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts of any length with any sampling parameters; some have siblings."""
    out: list[tuple[list[int], dict[str, Any]]] = []
    while len(out) < count:
        prompt = (rng.choice(prompts) * 4)[: rng.choice([None, 16, 17, 32, 33, 64])]
        given, some = parameters(rng)
        some |= {"min_p": rng.uniform(0.0, 0.2), "seed": rng.randrange(1 << 30)}
        out += [(prompt, given | chosen(rng, some))] * rng.choice([1, 1, 2, 4])
    return out[:count]


def serve(llm: Any, rng: random.Random, arriving: Sequence[tuple[list[int], Any]], name: str) -> list[Any]:
    """The output of each request (prompt, SamplingParams), in the order in which they come; which steps they come at
    depends on the engine.

    Args:
        name: what the requests' ids begin with.
    """
    waiting = list(enumerate(arriving))[::-1]
    said: dict[int, Any] = {}
    core = llm.llm_engine
    while waiting or core.has_unfinished_requests():
        for _ in range(rng.choice([0, 0, 0, 1, 2, 5]) if core.has_unfinished_requests() else 8):
            if waiting:
                i, (prompt, params) = waiting.pop()
                core.add_request(f"{name}-{i}", {"prompt_token_ids": prompt}, params)
        for done in core.step() if core.has_unfinished_requests() else ():
            if done.finished:
                (said[int(done.request_id.split("-")[1])],) = done.outputs
    return [said[i] for i in range(len(said))]


def run(llm: Any, seed: int, prompts: list[list[int]], count: int) -> list[list[int]]:
    """What each request said; the requests depend on the seed alone."""
    from vllm import SamplingParams

    rng = random.Random(seed)
    arriving = [(prompt, SamplingParams(**given)) for prompt, given in requests(rng, prompts, count)]
    return [list(said.token_ids) for said in serve(llm, rng, arriving, f"storm{seed}")]
