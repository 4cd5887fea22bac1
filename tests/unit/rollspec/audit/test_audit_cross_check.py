"""The engine without drafts reads some sampled tokens: a failure is the reference's, or of the engine that samples."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from rollspec.audit import run as audit_run
from rollspec.audit.engine import ArmOutput, AuditPlan, Variant
from rollspec.audit.evidence import Evidence, samples_from
from rollspec.audit.report import json_text, markdown, page, verdict_line
from rollspec.audit.verdict import AuditResult, DraftCounts, LogProbCheck

SERVED = np.array([0.5, 0.3, 0.15, 0.05])
OTHER = np.array([0.1, 0.4, 0.3, 0.2])
PLAN = AuditPlan(tuple((i, 1) for i in range(10)), tokens=6000)


class Reference:
    """A model with one distribution everywhere."""

    vocab, device = len(SERVED), "cpu"

    def __init__(self, p: np.ndarray) -> None:
        self.log_p = np.log(p)

    def fill(self, evidence: Evidence, prompts: Any, progress: Any) -> None:
        for s, tokens in enumerate(evidence.samples.tokens):
            evidence.add(s, np.tile(self.log_p, (len(tokens), 1)))

    def score(self, prompt: tuple[int, ...], response: tuple[int, ...]) -> np.ndarray:
        return self.log_p[list(response)]


def run(
    monkeypatch: pytest.MonkeyPatch,
    reference: np.ndarray = SERVED,
    sampled: np.ndarray = SERVED,
    refused: str | None = None,
) -> AuditResult:
    """The whole audit of an engine that serves `SERVED` and samples from `sampled`."""
    served, greedy = Reference(SERVED), samples_from([[0, 0]] * 10, range(10))
    rows = np.random.default_rng(0).choice(4, p=sampled, size=(200, 30)).tolist()
    log_probs = [served.score((), row).tolist() for row in rows]
    drawn = samples_from(rows, [i % 10 for i in range(200)], log_probs=log_probs)

    def run_arm(model: Any, plan: AuditPlan, arm: Variant, *, score: Any = (), **_: Any) -> ArmOutput:
        if arm.drafts:
            assert not score
            return ArmOutput(drawn, greedy, DraftCounts(90, 40), DraftCounts(9, 9), None)
        assert score == tuple((PLAN.prompts[i], tuple(rows[i])) for i in range(8)), "tokens of both, of few prompts"
        scored = refused or tuple(served.score(*each) for each in score)
        return ArmOutput(samples_from([], []), greedy, DraftCounts(0, 0), DraftCounts(0, 0), None, scored)

    monkeypatch.setattr(audit_run, "run_arm", run_arm)
    monkeypatch.setattr(audit_run, "Reference", lambda *_: Reference(reference))
    return audit_run.run_audit("m", PLAN, Variant("drafts", speculative_config={"method": "ngram"}))


def test_a_right_reference_is_said_to_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch)
    assert result.verdict == "pass" and result.reasons == ()
    assert result.cross_check is not None and result.cross_check.n == 240
    for text in (markdown(result), page(result)):
        assert "engine without drafts agree on 240 of these tokens: off by 0.0e+00 on average" in text
    assert json.loads(json_text(result))["cross_check"]["passed"]


def test_a_reference_that_is_another_model_is_not_a_fault_of_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, reference=OTHER)
    assert result.verdict == "fail" and result.min_p < 1e-9, "the tests cannot know"
    assert "the reference is not the model that the engine serves" in verdict_line(result)
    assert "does not sample" not in verdict_line(result)
    (said,) = [r for r in result.reasons if "read 240 of these tokens as prompts" in r]
    assert "weights, precision and quantisation" in said
    assert not any("drafts are to blame" in r for r in result.reasons)
    for text in (markdown(result), page(result)):
        assert "do not agree on 240 of these tokens" in text and said in text
    assert not json.loads(json_text(result))["cross_check"]["passed"]


def test_wrong_sampling_stays_a_fault_of_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, sampled=OTHER)
    assert result.verdict == "fail" and "FAIL: the engine does not sample from the target" in verdict_line(result)
    assert any("the fault is in how it samples or drafts" in r for r in result.reasons)
    assert any("drafts are to blame" in r for r in result.reasons)


def test_an_engine_that_scores_no_prompts_is_audited_without(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = "ValueError: prompt_logprobs are not supported"
    result = run(monkeypatch, refused=refused)
    assert result.verdict == "pass" and result.cross_check is None
    assert result.reasons == (f"the reference is not cross-checked: the engine scored no prompts ({refused}).",)


def test_scores_alone_decide_nothing() -> None:
    off, right = LogProbCheck(9, 0, 0.5, 0.5, 0.01, 0.001), LogProbCheck(9, 0, 0.0, 0.0, 0.01, 0.001)
    result = AuditResult([], 9, log_probs=right, cross_check=off)
    assert result.verdict == AuditResult([], 9, log_probs=right).verdict and not result.foreign
    assert any("the engine's reading of prompts is in doubt" in r for r in result.reasons)
    assert AuditResult([], 9, lossy=0.5, cross_check=right).origin == [], "the configuration is what fails"
