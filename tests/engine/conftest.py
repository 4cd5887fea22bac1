"""Fixtures of the engine tests: the example's shipped policy, and prompts it was trained for."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
"""Engines without rollspec, which texts are compared with, run in the same model runner."""


@pytest.fixture(scope="session", autouse=True)
def quick_starts() -> Iterator[None]:
    """Engines, servers and other programs that the tests start are forked from a process that has imported vLLM."""
    import warm_server

    with warm_server.started(["preloaded"]) as variables, pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from examples.grpo_arithmetic.prepare import prepare

    return Path(prepare(tmp_path_factory.mktemp("policy"), size="tiny").model)


@pytest.fixture(scope="session")
def prompts(model: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rng = random.Random(0)
    out = []
    for _ in range(6):
        terms = "+".join(str(rng.randrange(10, 99)) for _ in range(rng.choice([2, 3, 5, 9])))
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": f"{terms}=?"}], add_generation_prompt=True, tokenize=False
        )
        out.append(tokenizer.encode(text))
    return out


@pytest.fixture(scope="session")
def plain(model: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """What the engine says without rollspec, greedily: as it is, past ends, penalised, and up to the context limit."""
    from engines import build, call, close, generate

    llm = build(model)
    try:
        return {
            "info": call(llm, "info"),
            "greedy": generate(llm, prompts),
            "long": generate(llm, prompts, ignore_eos=True),
            "seeded": generate(llm, prompts, copies=1, limit=120, seed=5, temperature=1.0, ignore_eos=True),
            "penalty": generate(llm, prompts, copies=1, repetition_penalty=1.3),
            "limit": generate(llm, prompts[:4], copies=1, limit=256, ignore_eos=True),
        }
    finally:
        close(llm)
