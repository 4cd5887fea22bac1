"""Requests of many kinds that arrive and leave at any step."""

from __future__ import annotations

import random
from typing import Any


def requests(rng: random.Random, prompts: list[list[int]], count: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts of any length with any sampling parameters; some have siblings."""
    out: list[tuple[list[int], dict[str, Any]]] = []
    while len(out) < count:
        prompt = (rng.choice(prompts) * 4)[: rng.choice([None, 16, 17, 32, 33, 64])]
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
            "min_p": rng.uniform(0.0, 0.2),
            "repetition_penalty": rng.uniform(1.0, 1.5),
            "presence_penalty": rng.uniform(0.0, 0.8),
            "frequency_penalty": rng.uniform(0.0, 0.8),
            "min_tokens": rng.randrange(most + 1),
            "stop_token_ids": rng.sample(range(26, 46), 2),
            "logprobs": rng.randrange(4),
            "seed": rng.randrange(1 << 30),
        }
        given |= {name: value for name, value in some.items() if rng.random() < 0.2}
        out += [(prompt, given)] * rng.choice([1, 1, 2, 4])
    return out[:count]


def run(llm: Any, seed: int, prompts: list[list[int]], count: int) -> list[list[int]]:
    """What each request said, in the order in which they came; the order of steps and arrivals depends on the engine,
    the requests on the seed alone.
    """
    from vllm import SamplingParams

    rng = random.Random(seed)
    waiting = list(enumerate(requests(rng, prompts, count)))[::-1]
    said: dict[int, list[int]] = {}
    core = llm.llm_engine
    while waiting or core.has_unfinished_requests():
        for _ in range(rng.choice([0, 0, 0, 1, 2, 5]) if core.has_unfinished_requests() else 8):
            if waiting:
                i, (prompt, params) = waiting.pop()
                core.add_request(f"storm{seed}-{i}", {"prompt_token_ids": prompt}, SamplingParams(**params))
        for out in core.step() if core.has_unfinished_requests() else ():
            if out.finished:
                said[int(out.request_id.split("-")[1])] = list(out.outputs[0].token_ids)
    return [said[i] for i in range(count)]
