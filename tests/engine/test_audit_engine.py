"""The audit against real engines: it passes on the exact one, and fails on each that is wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import make_sharp_model

from rollspec.sampling.audit import AuditError, AuditResult, Evidence, check_log_probs, conclude, law_tests
from rollspec.sampling.audit_engine import Arm, Plan, run_arm
from rollspec.sampling.audit_reference import Reference

pytestmark = pytest.mark.engine

PROMPTS = tuple(tuple(range(3 + i, 11 + i)) for i in range(6))
NGRAM = {"method": "ngram_gpu", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
LIMIT = 240.0


@pytest.fixture(scope="module")
def sharp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sharp_model(tmp_path_factory.mktemp("sharp"))


@pytest.fixture
def audit(sharp: Path) -> Callable[[Arm], AuditResult]:
    """The sampled half of an audit: one engine, the tests, the verdict."""

    def run(arm: Arm, tokens: int = 8000, seed: int = 0) -> AuditResult:
        plan = Plan(PROMPTS, tokens=tokens, max_tokens=48, seed=seed)
        out = run_arm(sharp, plan, arm, greedy_rounds=0, timeout=LIMIT)
        target = Reference(sharp, plan.temperature)
        evidence = Evidence(out.samples, target.vocab, np.random.default_rng(0))
        target.fill(evidence, plan.prompts)
        return conclude(
            law_tests(evidence),
            out.samples.n_tokens,
            log_probs=check_log_probs(evidence),
            drafts=out.drafts if arm.speculates else None,
            provenance={"off": out.off},
        )

    return run


def sound(audit: Callable[..., AuditResult], *args: Any) -> AuditResult:
    """Of an engine that must pass: of a thousand such audits one fails by chance, but no two in a row."""
    result = audit(*args)
    return result if result.verdict == "pass" else audit(*args, seed=1)


def test_the_command_passes_with_suffix_drafts(sharp: Path, tmp_path: Path, run_bounded: Callable[..., Any]) -> None:
    """The whole command: greedy identity, law, log-probabilities, drafts of both fates."""
    out = tmp_path / "audit.json"
    cmd = [sys.executable, "-m", "rollspec.cli", "audit", "--model", sharp, "--preset", "suffix_only"]
    done = run_bounded([*map(str, cmd), "--tokens", "15000", "--out", str(out)], timeout=2 * LIMIT)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "PASS" in done.stdout
    result = json.loads(out.read_text())
    assert result["n_tokens"] >= 15000 and result["n_tests"] > 50 and result["reasons"] == []
    assert result["log_probs"]["max_error"] < 1e-4
    assert min(result["drafts"][k] for k in ("accepted", "rejected")) > 500
    greedy = result["greedy"]
    assert greedy["passed"] and greedy["identical"] + greedy["ties"] == greedy["sequences"] and greedy["ties"] <= 1
    assert greedy["drafts"]["accepted"] > 0


def test_the_command_checks_every_token_of_coupled_sampling(
    sharp: Path, tmp_path: Path, run_bounded: Callable[..., Any]
) -> None:
    out = tmp_path / "audit.json"
    cmd = [sys.executable, "-m", "rollspec.cli", "audit", "--model", sharp, "--set", "mode=coupled", "--switch-arms"]
    done = run_bounded([*map(str, cmd), "--tokens", "12000", "--out", str(out)], timeout=2 * LIMIT)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "mode coupled, draft lengths by random" in " ".join(done.stdout.split())
    result = json.loads(out.read_text())
    noise = result["noise"]
    assert noise["tokens"] == result["n_tokens"] >= 12000 and noise["wrong"] == 0 and noise["ties"] <= 2
    assert min(result["drafts"][k] for k in ("accepted", "rejected")) > 500


def test_learned_and_suffix_drafts_follow_the_law(audit: Callable[..., AuditResult], sharp: Path) -> None:
    """A draft model that is the target: its greedy drafts are accepted with the largest probability, about one half."""
    config = {
        "proposal.drafters": ["suffix", "draft_model"],
        "proposal.learned.model": str(sharp),
        "proposal.budget.policy": "fixed",
        "tuning.policy": "exp3spec",  # arms change all the time
        "tuning.guard.enabled": False,
    }
    result = sound(audit, Arm.with_rollspec(config), 12000)
    assert result.verdict == "pass", result.reasons
    assert result.drafts is not None and min(result.drafts.accepted, result.drafts.rejected) > 500


def test_vllms_own_drafts_pass(audit: Callable[..., AuditResult]) -> None:
    result = sound(audit, Arm("ngram", speculative_config=NGRAM))
    assert result.verdict == "pass", (result.reasons, result.tests[:3])


def test_a_lossy_redraw_fails(audit: Callable[..., AuditResult], monkeypatch: pytest.MonkeyPatch) -> None:
    """Redrawn from the target instead of the residual: the log-probabilities stay right, only the tokens are wrong."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    lossy = {"worker_extension_cls": "audit_redraw.RedrawFromTarget"}
    result = audit(Arm("lossy", speculative_config=NGRAM, engine=lossy), tokens=24000)
    assert result.verdict == "fail"
    assert result.log_probs is not None and result.log_probs.passed
    assert result.min_p < 1e-6


def test_a_planted_bias_fails(audit: Callable[..., AuditResult], monkeypatch: pytest.MonkeyPatch) -> None:
    """A logit of one token raised by 0.7, in the engine: found in the tokens, and that token is named."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    result = audit(Arm("biased", engine={"logits_processors": ["audit_bias:FavourOneToken"]}), tokens=20000)
    assert result.verdict == "fail"
    rejected = {t.where for t in result.tests if t.name == "token frequency" and t.p_adjusted <= result.alpha}
    assert rejected == {"token 7"}


def test_an_engine_that_does_not_draft_is_inconclusive(audit: Callable[..., AuditResult]) -> None:
    result = audit(Arm.with_rollspec("default", ["enabled=false"]), tokens=1000)
    assert result.verdict == "inconclusive"
    assert "nothing was drafted" in result.reasons[0]
    assert result.provenance["off"] == "enabled is false"


def test_an_engine_that_fails_or_hangs_is_one_sentence(sharp: Path) -> None:
    with pytest.raises(AuditError, match=r"did not finish within 2 s"):
        run_arm(sharp, Plan(PROMPTS), Arm.plain(), timeout=2)
    with pytest.raises(AuditError, match=r"ended with status 1: .*nonsense"):
        run_arm(sharp, Plan(PROMPTS), Arm.plain({"nonsense": 1}), timeout=LIMIT)
