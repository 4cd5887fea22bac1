"""The audit's own operating characteristics, by simulation: it finds planted biases and does not cry wolf."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rollspec.sampling.audit import Evidence, conclude, law_tests, samples_from

V, PROMPTS, SIBLINGS, LENGTH = 48, 4, 16, 40
Law = np.ndarray  # [contexts, V] probabilities; the context is the last token, then the prompt's number
Bias = Callable[[np.ndarray, np.random.Generator], np.ndarray]


def make_law(rng: np.random.Generator, sharpness: float = 2.2) -> Law:
    """A random Markov chain with about 1.6 nats per token, and one token that is common everywhere."""
    logits = rng.normal(size=(V + PROMPTS, V)) * sharpness
    logits[:, 5] += 3.0
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def sample(law: Law, rounds: int, rng: np.random.Generator, bias: Bias | None = None) -> tuple[Evidence, np.ndarray]:
    """Sample `rounds` x PROMPTS x SIBLINGS responses from `bias(law)` and collect evidence against `law`."""
    prompt = np.tile(np.repeat(np.arange(PROMPTS), SIBLINGS), rounds)
    context, columns = V + prompt, []
    for _ in range(LENGTH):
        p = law[context]
        p = p if bias is None else bias(p, rng)
        columns.append((rng.random(len(p))[:, None] > np.cumsum(p, -1)[:, :-1]).sum(-1))
        context = columns[-1]
    tokens = np.stack(columns, 1)
    evidence = Evidence(samples_from(list(tokens), prompt, np.repeat(np.arange(rounds), PROMPTS * SIBLINGS)), V, rng)
    log_law = np.log(law)
    for s in range(len(tokens)):
        evidence.add(s, log_law[np.concatenate([[V + prompt[s]], tokens[s, :-1]])])
    return evidence, tokens


def normalised(p: np.ndarray) -> np.ndarray:
    return p / p.sum(-1, keepdims=True)


def hotter(by: float) -> Bias:
    return lambda p, rng: normalised(p ** (1 / (1 + by)))


def one_token(by: float) -> Bias:
    """Token 5's odds are raised by the factor 1 + by."""

    def bias(p: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        q = p.copy()
        q[:, 5] *= 1 + by
        return normalised(q)

    return bias


def mixed_with_uniform(share: float) -> Bias:
    return lambda p, rng: (1 - share) * p + share / V


def mixed_with_argmax(share: float) -> Bias:
    return lambda p, rng: (1 - share) * p + share * (p == p.max(-1, keepdims=True))


def redraws_from_p(share: float) -> Bias:
    """A draft x ~ p at this share of positions, accepted with p(x); after a rejection the redraw is from p itself, not
    from what is left of it, as SPEC-RL does.
    """

    def bias(p: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        draft = (rng.random(len(p))[:, None] > np.cumsum(p, -1)[:, :-1]).sum(-1)
        rows = np.arange(len(p))
        q = p * (1 - p[rows, draft])[:, None]
        q[rows, draft] += p[rows, draft]
        return np.where((rng.random(len(p)) < share)[:, None], q, p)

    return bias


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
    law = make_law(rng)
    evidence, tokens = sample(law, rounds, rng, bias)
    result = conclude(law_tests(evidence), tokens.size)
    assert result.verdict == "fail", result.min_p
    assert "reject the target's law" in result.reasons[0]
    evidence, tokens = sample(law, rounds, rng)
    assert conclude(law_tests(evidence), tokens.size).verdict == "pass"


def test_false_alarms_are_as_rare_as_promised() -> None:
    """1000 audits of a correct sampler at alpha = 5 %, and every test's p-values uniform in the tail."""
    rng = np.random.default_rng(2)
    alarms, small, tests, by_name = 0, 0, 0, {}
    for run in range(1000):
        if run % 50 == 0:
            law = make_law(rng, sharpness=rng.choice([1.5, 2.2, 4.0]))
        evidence, _ = sample(law, 1, rng)
        found = law_tests(evidence)
        alarms += found[0].p_adjusted <= 0.05
        for t in found:
            hits, n = by_name.get(t.name, (0, 0))
            by_name[t.name] = (hits + (t.p_value <= 0.01), n + 1)
        small += sum(t.p_value <= 1e-3 for t in found)
        tests += len(found)
    # 50 expected at most; more than 72 has a probability of 0.001 at exactly 5 %.
    assert alarms <= 72
    assert small / tests <= 1.5e-3
    for name, (hits, n) in by_name.items():
        assert hits / n <= 0.01 + 4 * np.sqrt(0.01 / n), (name, hits, n)


def test_shared_noise_fails_although_every_law_is_right() -> None:
    """Siblings that reuse one noise sequence: each response is exact, but they are copies of one another."""
    rng = np.random.default_rng(3)
    law = make_law(rng)
    prompt = np.repeat(np.arange(PROMPTS), SIBLINGS)
    noise = rng.random((PROMPTS, LENGTH))
    context, columns = V + prompt, []
    for t in range(LENGTH):
        columns.append((noise[prompt, t][:, None] > np.cumsum(law[context], -1)[:, :-1]).sum(-1))
        context = columns[-1]
    tokens = np.stack(columns, 1)
    evidence = Evidence(samples_from(list(tokens), prompt), V, rng)
    for s in range(len(tokens)):
        evidence.add(s, np.log(law)[np.concatenate([[V + prompt[s]], tokens[s, :-1]])])
    result = conclude(law_tests(evidence), tokens.size)
    assert result.verdict == "fail"
    assert any(t.name == "independence" and t.p_adjusted <= result.alpha for t in result.tests)
