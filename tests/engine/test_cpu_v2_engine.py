"""vLLM's second model runner on CPU without Triton gives the first runner's tokens, with and without drafts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from heads import random_head
from models import make_sharp_model

pytestmark = pytest.mark.engine
PROGRAM = Path(__file__).with_name("cpu_v2_tokens.py")


@pytest.fixture(scope="module")
def sharp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sharp_model(tmp_path_factory.mktemp("sharp"))


def tokens(model: Path, folder: Path, runner: str, speculative: dict[str, Any] | None = None) -> dict[str, Any]:
    out = folder / f"{runner}.json"
    more = [json.dumps(speculative)] if speculative else []
    env = {**os.environ, "VLLM_USE_V2_MODEL_RUNNER": runner, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(model), str(out), *more],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(out.read_text()))


@pytest.fixture(scope="module")
def first_runner(sharp: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return tokens(sharp, tmp_path_factory.mktemp("v1"), "0")


@pytest.fixture(scope="module")
def second_runner(sharp: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return tokens(sharp, tmp_path_factory.mktemp("v2"), "1")


def test_every_deterministic_case_is_the_first_runners(first_runner, second_runner):
    assert second_runner["runner"] and not first_runner["runner"]
    different = [
        case for case in first_runner if case not in ("random", "runner") and second_runner[case] != first_runner[case]
    ]
    assert not different


@pytest.mark.parametrize("method", ["ngram_gpu", "eagle3", "draft_model"])
def test_drafts_leave_greedy_tokens_alone(sharp, tmp_path, second_runner, method):
    speculative: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if method == "ngram_gpu":
        speculative |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    else:
        speculative["model"] = str(sharp if method == "draft_model" else random_head(tmp_path / "head", sharp))
    found = tokens(sharp, tmp_path, "1", speculative)
    assert found["greedy"] == second_runner["greedy"]
    assert found["penalties"] == second_runner["penalties"]
    assert found["bad_words"] == second_runner["bad_words"]
