"""A GRPO job with TRL on CPU, vLLM colocated: drafts, versions, rewards, metrics, checkpoints, weight sync."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import young_head

from drafter_online.versions import Versions
from rollspec.proposal.history import History

pytest.importorskip("trl")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]


def in_float32(tiny: str, folder: Path) -> Path:
    """A policy as TRL trains it."""
    import torch
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    Qwen3ForCausalLM.from_pretrained(tiny, dtype=torch.float32).save_pretrained(folder / "float32")
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder / "float32")
    return folder / "float32"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from examples.grpo_arithmetic.prepare import prepare

    folder = tmp_path_factory.mktemp("policy")
    return in_float32(prepare(folder, size="tiny").model, folder)


def ran(run: Callable[..., Any], folder: Path, model: Path, *jobs: str) -> list[tuple[dict[str, Any], str]]:
    """What each of some jobs of `trl_job.py` left behind, and what it printed."""
    command = [sys.executable, Path(__file__).with_name("trl_job.py"), folder, model, *jobs]
    done = run(command, 500, cwd=ROOT, env={"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)})
    assert done.returncode == 0, done.stdout[-5000:]
    before, *printed = re.split(r"^=== .*$", done.stdout, flags=re.M)
    printed[0] = before + printed[0]
    return [(json.loads((folder / f"{j}.json").read_text()), text) for j, text in zip(jobs, printed, strict=True)]


def logged(text: str) -> list[str]:
    """What rollspec said in a job's output: the causes of its faults among it."""
    return [line for line in text.splitlines() if "rollspec: " in line]


@pytest.mark.supports("TRL", "colocate", "drafts", "policy versions", "metrics", "resume")
def test_grpo_with_trl(run_bounded: Callable[..., Any], model: Path, tmp_path: Path) -> None:
    (result, text), (resumed, again) = ran(run_bounded, tmp_path, model, "train", "resume")
    assert result["start"]["state"] == "suffix"
    steps = [row for row in result["log"] if "loss" in row]
    assert len(steps) == 4
    for i, row in enumerate(steps):
        assert row["rollspec/rollout/speculating"] == 1.0
        assert row["rollspec/faults"] == 0
        assert row["rollspec/policy/version"] == i, "the trainer's step is the policy version"
        assert row["rollspec/history/rewarded"] == 16
        assert row["rollspec/health/nan_logprobs"] == 0
        assert row["rollspec/health/logprob_corr"] > 0.999
        assert math.isfinite(row["loss"]) and row["rollspec/reward/mean"] == pytest.approx(row["reward"], abs=1e-4)
        assert row["rollspec/rollout/tokens"] == pytest.approx(row["completions/mean_length"] * 16)
        assert 0 < row["rollspec/rollout/generation_share"] <= 1
    first, second = steps[:2], steps[2:]
    assert min(r["rollspec/accept/length"] for r in second) > 1.2
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


@pytest.mark.supports("TRL", "colocate", "draft head")
@pytest.mark.slow  # `test_service_ray.py` and the job above are its shorter siblings
@pytest.mark.timeout(1300)
def test_a_head_is_trained_beside_a_trl_job_and_resumes(
    run_bounded: Callable[..., Any], model: Path, tmp_path: Path
) -> None:
    """A trainer of its own learns from the rollouts, the engine takes its versions, a resumed job goes on from them."""
    ((result, text),) = ran(run_bounded, tmp_path, model, "head")
    steps = [row for row in result["log"] if "loss" in row]
    assert len(steps) == 4, text[-3000:]
    for row in steps:
        assert row["rollspec/faults"] == 0, logged(text)
        assert row["rollspec/health/logprob_corr"] > 0.999
    total = young_head.totals(steps, "captured", "sent", "passes", "train_steps", "swaps")
    assert total["captured"] >= 32 and total["sent"] > 0 and total["train_steps"] > 0, total
    assert total["swaps"] >= 1 and total["passes"] > 0, "a version was swapped in, and a head drafts"
    assert any("rollspec/accept/rate/eagle3" in r for r in steps)
    assert result["info"]["drafter"]["training"]["error"] is None, result["info"]["drafter"]

    saved = tmp_path / "checkpoint-4" / "rollspec" / "drafter"
    assert list(saved.glob("state/step-*")) and (saved / "buffer" / "index.json").is_file()
    number = young_head.promote_by_hand(Versions(saved / "versions"))
    ((resumed, again),) = ran(run_bounded, tmp_path, model, "head_resume")
    (row,) = [row for row in resumed["log"] if row.get("step") == 5 and "loss" in row]
    assert row["rollspec/faults"] == 0, logged(again)
    head = resumed["info"]["drafter"]
    assert head["version"] >= number and head["training"]["error"] is None, head


@pytest.mark.supports("TRL", "colocate, tools", "drafts", "policy versions", "metrics")
@pytest.mark.slow  # `test_verl_tools.py` is its sibling
def test_tools_in_trls_own_loop(run_bounded: Callable[..., Any], tmp_path: Path) -> None:
    """TRL's own tool loop. What a tool says is context: what is kept, rewarded and drafted is what the policy sampled,
    turn by turn, under the first prompts; engine and trainer agree about it.
    """
    from examples.agent_tools.prepare import prepare
    from examples.agent_tools.tokenizer import build_tokenizer

    ((result, text),) = ran(run_bounded, tmp_path, in_float32(prepare(tmp_path, size="tiny").model, tmp_path), "tools")
    steps = [row for row in result["log"] if "loss" in row]
    assert len(steps) == 4, text[-3000:]
    for row in steps:
        assert row["rollspec/faults"] == 0 and row["rollspec/reward/mean"] > 0.1
        assert row["rollspec/health/logprob_corr"] > 0.999
        assert row["tools/call_frequency"] > 1 and row["tools/failure_frequency"] < 0.2
        # A last turn that is cut to the completion's length is not what the engine sampled.
        turns = 16 * (1 + row["tools/call_frequency"])
        assert 0.9 * turns < row["rollspec/history/rewarded"] <= turns
        # TRL's mean leaves out what tools said, too.
        assert row["rollspec/rollout/tokens"] == pytest.approx(row["completions/mean_length"] * 16, rel=0.05)
        assert 0 < row["rollspec/accept/thinking_share"] < 1
    first, second = steps[:2], steps[2:]
    assert min(row["rollspec/accept/length"] for row in second) > 1.3, "the second epoch is not drafted from the first"
    assert sum(r["rollspec/accept/length"] for r in second) > sum(r["rollspec/accept/length"] for r in first)

    history = History(1 << 30, 16)
    assert history.load(tmp_path / "checkpoint-4" / "rollspec" / "replica_0") > 0
    assert len(history) == 8, "a grown prompt is no prompt of its own"
    responses = [r for _, entry in history for r in entry.responses]
    tool = build_tokenizer().convert_tokens_to_ids("<tool_response>")
    assert not [r for r in responses if tool in r.tokens.tolist()]
    assert {r.turn for r in responses} >= {0, 1, 2}
