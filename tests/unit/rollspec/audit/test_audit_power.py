"""The audit's own operating characteristics, by simulation: it finds planted biases and does not cry wolf."""

from __future__ import annotations

import numpy as np
import pytest
from audit_cases import (
    LENGTH,
    PROMPTS,
    SIBLINGS,
    Bias,
    V,
    hotter,
    make_distribution,
    mixed_with_argmax,
    mixed_with_uniform,
    one_token,
    redraws_from_p,
    sample,
)

from rollspec.audit.distribution import detectable, distribution_tests
from rollspec.audit.evidence import Evidence, samples_from
from rollspec.audit.verdict import AuditResult


@pytest.mark.parametrize(
    ("bias", "rounds"),
    [
        (hotter(0.05), 32),
        (one_token(0.1), 64),
        (mixed_with_uniform(0.01), 4),
        (mixed_with_argmax(0.05), 16),
        (mixed_with_argmax(0.02), 64),
        (redraws_from_p(1.0), 4),
        (redraws_from_p(0.2), 32),
    ],
    ids=["5% hotter", "one token 10%", "1% uniform", "5% argmax", "2% argmax", "SPEC-RL redraw", "20% redraws"],
)
def test_a_planted_bias_fails(bias: Bias, rounds: int) -> None:
    rng = np.random.default_rng(1)
    distribution = make_distribution(rng)
    evidence, tokens = sample(distribution, rounds, rng, bias)
    result = AuditResult(distribution_tests(evidence), tokens.size)
    assert result.verdict == "fail", result.min_p
    assert "reject the target's distribution" in result.reasons[0]
    evidence, tokens = sample(distribution, rounds, rng)
    assert AuditResult(distribution_tests(evidence), tokens.size).verdict == "pass"


def test_false_alarms_are_as_rare_as_promised() -> None:
    """1000 audits of a correct sampler at alpha = 5 %, and every test's p-values uniform in the tail."""
    rng = np.random.default_rng(2)
    alarms, small, tests, by_name = 0, 0, 0, {}
    for run in range(1000):
        if run % 50 == 0:
            distribution = make_distribution(rng, sharpness=rng.choice([1.5, 2.2, 4.0]))
        evidence, _ = sample(distribution, 1, rng)
        found = distribution_tests(evidence)
        alarms += found[0].p_adjusted <= 0.05
        for t in found:
            below, n = by_name.get(t.name, (0, 0))
            by_name[t.name] = (below + (t.p_value <= 0.01), n + 1)
        small += sum(t.p_value <= 1e-3 for t in found)
        tests += len(found)
    # 50 expected at most; more than 72 has a probability of 0.001 at exactly 5 %.
    assert alarms <= 72
    assert small / tests <= 1.5e-3
    for name, (below, n) in by_name.items():
        assert below / n <= 0.01 + 4 * np.sqrt(0.01 / n), (name, below, n)


def test_shared_noise_fails_although_every_distribution_is_right() -> None:
    """Siblings that reuse one noise sequence: each response is exact, but they are copies of one another."""
    rng = np.random.default_rng(3)
    distribution = make_distribution(rng)
    prompt = np.repeat(np.arange(PROMPTS), SIBLINGS)
    noise = rng.random((PROMPTS, LENGTH))
    context, columns = V + prompt, []
    for t in range(LENGTH):
        columns.append((noise[prompt, t][:, None] > np.cumsum(distribution[context], -1)[:, :-1]).sum(-1))
        context = columns[-1]
    tokens = np.stack(columns, 1)
    evidence = Evidence(samples_from(list(tokens), prompt), V, rng)
    for s in range(len(tokens)):
        evidence.add(s, np.log(distribution)[np.concatenate([[V + prompt[s]], tokens[s, :-1]])])
    result = AuditResult(distribution_tests(evidence), tokens.size)
    assert result.verdict == "fail"
    assert any(t.name == "independence" and t.p_adjusted <= result.alpha for t in result.tests)


@pytest.mark.parametrize("fault", ["uniform", "argmax", "odds"])
def test_what_it_says_it_can_see_it_finds(fault: str) -> None:
    """A fault of the size that is to be found nine times in ten: found in most of 15 audits."""
    rng = np.random.default_rng(5)
    distribution = make_distribution(rng)
    evidence, _ = sample(distribution, 8, rng)
    tests = distribution_tests(evidence)
    power = detectable(evidence, len(tests), 1e-3)
    assert power is not None and power.tokens == 8 * 64 * 40 and power.token == 5
    assert power.uniform is not None and power.argmax is not None and power.odds is not None
    bias = {
        "uniform": lambda: mixed_with_uniform(power.uniform),
        "argmax": lambda: mixed_with_argmax(power.argmax),
        "odds": lambda: one_token(power.odds),
    }[fault]()
    found = sum(distribution_tests(sample(distribution, 8, rng, bias)[0])[0].p_adjusted <= 1e-3 for _ in range(15))
    assert found >= 10, (found, power)
    assert evidence.vocab == V
