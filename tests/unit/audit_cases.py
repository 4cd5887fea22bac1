"""A sampler with a known distribution and planted faults, for what the audit finds and how rarely it cries wolf."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rollspec.audit.evidence import Evidence, Samples, samples_from

V, PROMPTS, SIBLINGS, LENGTH = 48, 4, 16, 40
Distribution = np.ndarray  # [contexts, V] probabilities; the context is the last token, then the prompt's number
Bias = Callable[[np.ndarray, np.random.Generator], np.ndarray]


def make_distribution(rng: np.random.Generator, sharpness: float = 2.2) -> Distribution:
    """A random Markov chain with about 1.6 nats per token, and one token that is common everywhere."""
    logits = rng.normal(size=(V + PROMPTS, V)) * sharpness
    logits[:, 5] += 3.0
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def sample(
    distribution: Distribution, rounds: int, rng: np.random.Generator, bias: Bias | None = None
) -> tuple[Evidence, np.ndarray]:
    """Sample `rounds` x PROMPTS x SIBLINGS responses with the bias; evidence against the distribution."""
    prompt = np.tile(np.repeat(np.arange(PROMPTS), SIBLINGS), rounds)
    context, columns = V + prompt, []
    for _ in range(LENGTH):
        p = distribution[context]
        p = p if bias is None else bias(p, rng)
        columns.append((rng.random(len(p))[:, None] > np.cumsum(p, -1)[:, :-1]).sum(-1))
        context = columns[-1]
    tokens = np.stack(columns, 1)
    evidence = Evidence(samples_from(list(tokens), prompt, np.repeat(np.arange(rounds), PROMPTS * SIBLINGS)), V, rng)
    log_distribution = np.log(distribution)
    for s in range(len(tokens)):
        evidence.add(s, log_distribution[np.concatenate([[V + prompt[s]], tokens[s, :-1]])])
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


def evidence(rows: list[list[int]], p: np.ndarray, log_probs: Any = None) -> Evidence:
    """Evidence of responses whose every token has the distribution p; `log_probs` are what the engine reports."""
    samples = samples_from(rows, [0] * len(rows))
    if log_probs is not None:
        samples = Samples(samples.tokens, samples.prompt, samples.round, log_probs)
    e = Evidence(samples, len(p), np.random.default_rng(0))
    for s, row in enumerate(rows):
        e.add(s, np.log(np.tile(p, (len(row), 1))))
    return e
