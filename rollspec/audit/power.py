"""Power of an audit of so many tokens: the smallest faults that it finds nine times in ten, from its own samples.

Planted faults move the means of the z-tests by a known amount per unit of fault, and the tests' variances are known, so
the size that reaches the threshold (Holm's strictest, alpha over the number of tests) is a line of algebra each. Other
tests may find the same fault earlier: these sizes are upper bounds. `benchmarks/audit_power.py` simulates them.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

from rollspec.audit.evidence import Evidence

CHANCE = 0.9


@dataclass(frozen=True, slots=True)
class Power:
    """Smallest faults found with probability `CHANCE`; None where no size would be found, or there are no tokens.

    Attributes:
        uniform: share of tokens replaced by uniform ones.
        argmax: share of tokens replaced by the most likely one.
        odds: relative change of the odds of one token, `token`, the most telling one.
    """

    tokens: int
    uniform: float | None
    argmax: float | None
    odds: float | None
    token: int | None


def detectable(evidence: Evidence, tests: int, alpha: float) -> Power | None:
    """The sizes for the tokens in `evidence`, tested by so many tests at a family-wise `alpha`; None where by none."""
    if not tests:
        return None
    normal = NormalDist()
    z = normal.inv_cdf(1 - alpha / (2 * tests)) + normal.inv_cdf(CHANCE)

    def share(variance: float, shift: float) -> float | None:
        found = z * variance**0.5 / shift if shift > 0 else 1.0
        return found if found < 1 else None

    p, of_token = evidence.p_max, evidence.token_moments[2]
    return Power(
        len(p),
        share(float(evidence.surprisal_variance.sum()), float((evidence.flat - evidence.entropy).sum())),
        share(float((p * (1 - p)).sum()), float((1 - p).sum())),
        z / float(of_token.max()) ** 0.5 if of_token.max() > 0 else None,
        int(of_token.argmax()) if of_token.max() > 0 else None,
    )
