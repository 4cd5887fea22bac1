"""A GRPO job with TRL on CPU, vLLM colocated: drafts, versions, rewards, metrics, checkpoints, weight sync."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny policy in float32, as TRL trains it."""
    import torch
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    from examples.grpo_arithmetic.prepare import prepare

    folder = tmp_path_factory.mktemp("policy")
    tiny = prepare(folder, size="tiny").model
    Qwen3ForCausalLM.from_pretrained(tiny, dtype=torch.float32).save_pretrained(folder / "float32")
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder / "float32")
    return folder / "float32"


@pytest.mark.supports("TRL", "colocate", "drafts", "versions", "metrics", "resume")
def test_grpo_with_trl(run_bounded: Callable[..., Any], model: Path, tmp_path: Path) -> None:
    done = run_bounded([sys.executable, Path(__file__).with_name("trl_job.py"), tmp_path, model], 500, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-5000:]
    text, _, again = done.stdout.partition("=== resume")
    result, resumed = (json.loads((tmp_path / f"{what}.json").read_text()) for what in ("train", "resume"))
    assert result["start"]["state"] == "suffix"
    steps = [row for row in result["log"] if "loss" in row]
    assert len(steps) == 4
    for i, row in enumerate(steps):
        assert row["rollspec/rollout/speculating"] == 1.0
        assert row["rollspec/guard/faults"] == 0
        assert row["rollspec/policy/version"] == i, "the trainer's step is the policy version"
        assert row["rollspec/history/rewarded"] == 16
        assert row["rollspec/health/nan_logprobs"] == 0
        assert row["rollspec/health/logprob_corr"] > 0.999
        assert math.isfinite(row["loss"]) and row["rollspec/reward/mean"] == pytest.approx(row["reward"], abs=1e-4)
        assert row["rollspec/rollout/tokens"] == pytest.approx(row["completions/mean_length"] * 16)
        assert 0 < row["rollspec/rollout/generation_share"] <= 1
    first, second = steps[:2], steps[2:]
    assert all(r["rollspec/accept/accepted"] > 0 for r in second)
    assert sum(r["rollspec/accept/length"] for r in second) > sum(r["rollspec/accept/length"] for r in first)
    assert "rollspec:" not in text.replace("rollspec: the engine speculates", ""), "nothing to complain about"

    sync = result["sync"]
    # vLLM makes a bfloat16 engine of a float32 model, so tokens whose logits are nearly equal may be exchanged.
    before, *after = sync["gaps"]
    assert max(after) < 0.25 and before > 1.0 and sync["accepted"] > 0

    assert (tmp_path / "checkpoint-4" / "rollspec" / "replica_0" / "history.safetensors").is_file()
    (row,) = [row for row in resumed["log"] if row.get("step") == 5 and "loss" in row]
    assert row["rollspec/history/prompts"] == 8, again[-3000:]
    assert row["rollspec/policy/version"] == 4
    assert row["rollspec/accept/length"] > first[0]["rollspec/accept/length"]
