"""How far `reuse.mode: lenient` is from the policy, measured in what was sampled and computed from its rule.

Where an old response still stood, the next token was kept from it or drawn in its place; by the rule its law is
min(l p, q) + (1 - a) p, and its distance from p is TV = 1/2 sum |min(l p, q) - a p|. Both laws are known in full from
the two reference models, so the distance can be measured without binning: on the set A of tokens that the rule
favours, where its law exceeds p, the share of tokens in A exceeds p(A) by TV on average. Each position gives one
unbiased number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rollspec.sampling import lenient
from rollspec.sampling.audit_evidence import Samples
from rollspec.sampling.audit_tests import Floats, Ints

MOST = 20_000
"""Positions looked at: each needs two rows of the whole vocabulary, and the error is below 0.004 by then."""


class Policy(Protocol):
    """What is asked of a reference model (`audit_reference.Reference`)."""

    def log_probs(self, prompt: Sequence[int], response: list[int]) -> Floats:
        """[tokens, V] log-probabilities of the token at each position of one response."""


@dataclass(frozen=True, slots=True)
class LossyCheck:
    """`positions` decided by the rule, of `tokens` sampled in all. `measured` +- `error` (one standard error) is the
    total variation found, `theory` what the rule's formula says, both means over these positions; `largest` is the
    formula's largest.
    """

    tokens: int
    ruled: int
    positions: int
    measured: float
    error: float
    theory: float
    largest: float
    bias: float

    @property
    def agrees(self) -> bool:
        """Whether what was measured is what the formula says, within four standard errors."""
        return abs(self.measured - self.theory) <= 4 * max(self.error, 1e-12)


def check_lossy(
    samples: Samples,
    ruled: Ints,
    prompts: Sequence[Sequence[int]],
    new: Policy,
    old: Policy,
    bias: float,
    most: int = MOST,
) -> LossyCheck:
    """Measure the distance.

    Args:
        samples: what was sampled. ruled: [sequences] leading tokens that the rule decided.
        prompts: tokens by prompt index. new, old: the two policies at their temperatures.
    """
    excess: list[float] = []
    theory: list[float] = []
    order = np.random.default_rng(0).permutation(np.flatnonzero(ruled > 0))  # `most` must not prefer some prompts
    for s in order.tolist():
        if len(excess) >= most:
            break
        n = int(ruled[s])
        tokens = samples.tokens[s][:n]
        prompt = prompts[int(samples.prompt[s])]
        p, q = (np.exp(r.log_probs(prompt, tokens.tolist())) for r in (new, old))  # [n, V]
        favoured = lenient.law(p, q, bias) > p  # [n, V]
        excess += (favoured[np.arange(n), tokens] - (p * favoured).sum(-1)).tolist()
        theory += lenient.total_variation(p, q, bias).tolist()
    n = len(excess)
    return LossyCheck(
        tokens=samples.n_tokens,
        ruled=int(ruled.sum()),
        positions=n,
        measured=float(np.mean(excess)) if n else 0.0,
        error=float(np.std(excess)) / math.sqrt(n) if n else 0.0,
        theory=float(np.mean(theory)) if n else 0.0,
        largest=max(theory, default=0.0),
        bias=bias,
    )
