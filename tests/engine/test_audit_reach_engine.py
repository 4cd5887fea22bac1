"""The audit over more than one engine's law, on real engines: lossy reuse, kept noise, two builds, drafter swaps."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from heads import random_head
from models import make_sharp_model

from rollspec.sampling.audit import AuditResult, SwapCheck, conclude
from rollspec.sampling.audit_engine import Arm, ArmOutput, Plan, run_arm
from rollspec.sampling.audit_reference import Reference
from rollspec.sampling.audit_run import Judged, _compare, _judge

pytestmark = pytest.mark.engine

LIMIT = 500.0
PROMPTS = tuple(tuple(range(3 + i, 11 + i)) for i in range(6))
EVERYTHING = ["proposal.budget.policy=fixed", "tuning.policy=static", "tuning.guard.enabled=false"]
"""Is verified, whatever it costs here."""

SWITCHING = ["tuning.policy=random", "tuning.guard.enabled=false"]
COUPLED = ["mode=coupled", *SWITCHING]

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


def test_lenient_reuse_is_flagged_with_its_distance(audit: Audit, sharp: Path, tmp_path: Path) -> None:
    """The whole command."""
    old = moved(sharp, tmp_path / "old", 0.05)
    found = audit("--preset", "spec_rl", "--set", "reuse.bias=0", "--old", str(old))
    assert found["verdict"] == "fail"
    assert "reuse.mode = lenient" in found["reasons"][0]
    lossy = found["lossy"]
    assert lossy["positions"] > 2000 and lossy["theory"] > 0.005
    assert abs(lossy["measured"] - lossy["theory"]) < 4 * lossy["error"]
    assert found["log_probs"]["passed"], "nothing but the tokens can show it"
    assert "comes with reuse and speculation" in found["reasons"][-1]
    assert "total variation" in " ".join(found["said"].split())


def sampled(sharp: Path, arm: Arm, tokens: int = 4000, samples: int = 16) -> tuple[ArmOutput, Judged, Plan]:
    """The sampled half of an audit."""
    plan = Plan(PROMPTS, tokens=tokens, samples=samples, max_tokens=48)
    output = run_arm(sharp, plan, arm, timeout=LIMIT)
    target = Reference(sharp, plan.temperature)
    return output, _judge(output.samples, target, plan, lambda done, total: None, arm), plan


def verdict(output: ArmOutput, judged: Judged, arm: Arm, **more: Any) -> AuditResult:
    return conclude(
        judged.tests,
        output.samples.n_tokens,
        log_probs=judged.log_probs,
        noise=judged.noise,
        drafts=output.drafts if arm.drafts else None,
        **more,
    )


def test_kept_noise_follows_the_policy_that_replaced_another(sharp: Path, tmp_path: Path) -> None:
    arm = replace(Arm.with_rollspec("coupled_reuse", EVERYTHING), old=str(moved(sharp, tmp_path / "old")))
    output, judged, _ = sampled(sharp, arm, samples=64)
    result = verdict(output, judged, arm)
    assert result.verdict == "pass", result.reasons
    assert judged.noise is not None and judged.noise.tokens == output.samples.n_tokens
    assert min(output.drafts.accepted, output.drafts.rejected) > 100


def test_two_builds_say_the_same_under_coupled(sharp: Path) -> None:
    """Steps that overlap against ones that follow each other, in small batches with prompts in chunks."""
    tight = {"max_num_seqs": 7, "max_num_batched_tokens": 64, "enable_chunked_prefill": True}
    tight |= {"async_scheduling": False}
    first = Arm.with_rollspec("default", COUPLED)
    second = Arm.with_rollspec("default", [*COUPLED, "proposal.k_max=4"], tight)
    (one, judged, plan), (other, again, _) = (sampled(sharp, arm) for arm in (first, second))
    build = _compare(one, other, judged, again, Reference(sharp, plan.temperature), plan, second)
    result = verdict(one, judged, first, build=build)
    assert result.verdict == "pass", result.reasons
    same = build.same
    assert same is not None and same.identical + same.ties == same.sequences > 80 and same.ties <= 2
    assert build.noise is not None and build.drafts is not None and build.drafts.accepted > 0


@pytest.mark.parametrize("mode", ["standard", "coupled"])
def test_drafter_swaps_while_requests_run_change_no_law(model: Path, tmp_path: Path, mode: str) -> None:
    heads = [random_head(tmp_path / f"head{i}", model, seed=i) for i in range(3)]
    learned = ["proposal.drafters=[suffix,eagle3]", f"proposal.learned.model={heads[0]}", f"mode={mode}"]
    arm = Arm.with_rollspec("default", [*learned, "proposal.budget.policy=fixed", *SWITCHING])
    arm = replace(arm, swaps=(str(heads[1]), str(heads[2])))
    output, judged, _ = sampled(model, arm)
    result = verdict(output, judged, arm, swaps=SwapCheck(output.swaps, output.swap_errors))
    assert result.verdict == "pass", result.reasons
    assert output.swaps >= 3 and not output.swap_errors
    assert min(output.drafts.accepted, output.drafts.rejected) > 100
