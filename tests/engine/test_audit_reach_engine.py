"""The audit over more than one engine's law, on real engines: lossy reuse, kept noise, two builds, drafter swaps."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from heads import random_head
from models import make_sharp_model

pytestmark = pytest.mark.engine

LIMIT = 500.0

Audit = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def sharp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sharp_model(tmp_path_factory.mktemp("sharp"))


@pytest.fixture
def audit(sharp: Path, tmp_path: Path, run_bounded: Callable[..., Any]) -> Audit:
    """The command's JSON; its exit status under `status`."""

    def run(*args: str, tokens: int = 8000) -> dict[str, Any]:
        out = tmp_path / "audit.json"
        cmd = [sys.executable, "-m", "rollspec.cli", "audit", "--model", str(sharp), "--tokens", str(tokens)]
        done = run_bounded([*cmd, "--out", str(out), *args], timeout=LIMIT)
        assert out.is_file(), done.stdout[-3000:]
        found: dict[str, Any] = json.loads(out.read_text())
        assert found["verdict"] == {0: "pass", 1: "fail", 2: "inconclusive"}[done.returncode]
        return found | {"said": done.stdout}

    return run


def moved(model: Path, folder: Path, scale: float = 0.02) -> Path:
    """The policy before a step that moved all its weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    other = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.0 + scale * torch.randn_like(p))
    other.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("bias", [0.0, 0.5])
def test_lenient_reuse_is_flagged_with_its_distance(audit: Audit, sharp: Path, tmp_path: Path, bias: float) -> None:
    old = moved(sharp, tmp_path / "old", 0.05)
    found = audit("--preset", "spec_rl", "--set", f"reuse.bias={bias}", "--old", str(old))
    assert found["verdict"] == "fail"
    assert "reuse.mode = lenient" in found["reasons"][0]
    lossy = found["lossy"]
    assert lossy["positions"] > 2000 and lossy["theory"] > 0.005
    assert abs(lossy["measured"] - lossy["theory"]) < 4 * lossy["error"]
    assert found["log_probs"]["passed"], "nothing but the tokens can show it"
    assert "comes with reuse and speculation" in found["reasons"][-1]
    assert "total variation" in " ".join(found["said"].split())


def test_kept_noise_follows_the_policy_that_replaced_another(audit: Audit, sharp: Path, tmp_path: Path) -> None:
    old = moved(sharp, tmp_path / "old")
    found = audit("--preset", "coupled_reuse", "--old", str(old), "--samples", "64", tokens=12000)
    assert found["verdict"] == "pass", found["reasons"]
    assert found["noise"]["wrong"] == 0 and found["noise"]["tokens"] == found["n_tokens"]
    assert min(found["drafts"][k] for k in ("accepted", "rejected")) > 100


def test_two_builds_say_the_same_under_coupled_and_follow_one_law_under_standard(audit: Audit) -> None:
    second = ["max_num_seqs=7", "max_num_batched_tokens=64", "enable_chunked_prefill=true", "proposal.k_max=4"]
    options = [text for pair in second for text in ("--second", pair)]
    found = audit("--set", "mode=coupled", "--switch-arms", *options)
    assert found["verdict"] == "pass", found["reasons"]
    same = found["build"]["same"]
    assert same["identical"] + same["ties"] == same["sequences"] > 100 and same["ties"] <= 2
    assert found["build"]["noise"]["wrong"] == 0 and found["build"]["drafts"]["accepted"] > 0

    found = audit("--switch-arms", *options)
    assert found["verdict"] == "pass", found["reasons"]
    assert found["build"]["same"] is None and found["build"]["n_tokens"] >= 8000
    assert any(t["where"].startswith("second build: ") for t in found["tests"])


def test_drafter_swaps_while_requests_run_change_no_law(audit: Audit, sharp: Path, tmp_path: Path) -> None:
    heads = [random_head(tmp_path / f"head{i}", sharp, seed=i) for i in range(3)]
    learned = {
        "proposal.drafters": "[suffix,eagle3]",
        "proposal.learned.model": str(heads[0]),
        "proposal.budget.policy": "fixed",
    }
    options = [text for k, v in learned.items() for text in ("--set", f"{k}={v}")]
    options += ["--switch-arms", "--swap", str(heads[1]), "--swap", str(heads[2])]
    for mode in ("standard", "coupled"):
        found = audit("--set", f"mode={mode}", *options)
        assert found["verdict"] == "pass", found["reasons"]
        assert found["swaps"]["made"] >= 5 and not found["swaps"]["errors"]
        assert min(found["drafts"][k] for k in ("accepted", "rejected")) > 200
