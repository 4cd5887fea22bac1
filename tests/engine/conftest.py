"""Fixtures of the engine tests: the example's shipped policy, and prompts it was trained for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from models import sums

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
    return sums(model)


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
