"""The elementary tests of the audit: sums against exact moments, counts against probabilities, many tests at once.

Pure functions over numpy arrays. Every null distribution here is exact in its moments or checked by simulation,
because an audit is of use only without false alarms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MIN_EXPECTED = 5.0
"""Cells with a smaller expected count are merged before a G-test (Cochran 1954)."""

MAX_SKEW = 0.5
"""A sum whose null distribution is more skewed than this holds too few random events to be tested by its moments."""


@dataclass(frozen=True, slots=True)
class TestResult:
    """One test. `statistic` is a z-score or a G; `df` is None for z. `p_adjusted` is Holm's, over the whole audit."""

    __test__ = False  # not a test class, whatever pytest thinks of its name

    name: str
    where: str
    n: int
    statistic: float
    df: float | None
    p_value: float
    p_adjusted: float = 1.0


def moment_test(value: float, mean: float, variance: float, third: float, step: float = 0.0) -> tuple[float, float]:
    """Two-sided test that a sum of independent terms has the given moments.

    The tail is that of a gamma distribution with the same moments (Pearson type III) where it is heavier than the
    normal one, and the normal one elsewhere: a sum of rare events is skewed, and a plain z-test would alarm on it.

    Args:
        third: third central moment. step: lattice width of the sum (1 for counts), for the continuity correction.

    Returns:
        (z, p). With no variance at all, p is 1 if the value is the mean and 0 otherwise.
    """
    from scipy.special import gammainc, gammaincc

    value, mean, variance, third = float(value), float(mean), float(variance), float(third)
    deviation = value - mean
    if variance <= 1e-12:
        return (0.0, 1.0) if abs(deviation) <= 1e-6 else (math.copysign(math.inf, deviation), 0.0)
    sd = math.sqrt(variance)
    z = math.copysign(max(abs(deviation) - step / 2, 0.0), deviation) / sd
    skew = third / sd**3
    normal = 0.5 * math.erfc(abs(z) / math.sqrt(2))
    gamma = 0.0
    if abs(skew) > 1e-4:
        shape = 4 / skew**2
        at = shape + math.copysign(1, skew) * z * math.sqrt(shape)
        upper = (z > 0) == (skew > 0)
        gamma = float(gammaincc(shape, at) if upper else gammainc(shape, at)) if at > 0 else float(upper)
    return z, min(1.0, 2 * max(normal, gamma))


def binomial_test(count: int, n: int, p: float) -> tuple[float, float]:
    """Exact two-sided test of a count with distribution Binomial(n, p): (z, twice the smaller tail)."""
    from scipy.special import bdtr, bdtrc

    upper = 1.0 if count == 0 else float(bdtrc(count - 1, n, p))
    z = (count - n * p) / math.sqrt(n * p * (1 - p))
    return z, min(1.0, 2 * min(upper, float(bdtr(count, n, p))))


def merge_rare(probabilities: Floats, n: int) -> Ints:
    """Cell of each token for a G-test with n draws: a common token has its own, the rare ones share the last.

    [V] cell numbers 0..c-1 for `probabilities` [V]; c is 1 where nothing can be tested. Where the rare ones together
    are still rare, the rarest common token joins them.
    """
    common = np.flatnonzero(probabilities * n >= MIN_EXPECTED)
    common = common[np.argsort(-probabilities[common], kind="stable")]
    while len(common) and 0 < (1 - probabilities[common].sum()) * n < MIN_EXPECTED and len(common) < len(probabilities):
        common = common[:-1]
    cells = np.full(len(probabilities), len(common), dtype=np.int64)
    cells[common] = np.arange(len(common))
    return cells


def g_test(observed: ArrayLike, probabilities: ArrayLike) -> tuple[float, int, float]:
    """G-test of multinomial counts (Woolf 1957), with Williams' (1976) correction: (G, degrees of freedom, p)."""
    from scipy.special import chdtrc

    counts, p = np.asarray(observed, dtype=np.float64), np.asarray(probabilities, dtype=np.float64)
    n, df = counts.sum(), len(counts) - 1
    if df < 1 or n == 0:
        return 0.0, 0, 1.0
    q = 1 + ((1 / p).sum() - 1) / (6 * n * df)
    ratio = np.divide(counts, n * p, out=np.ones_like(p), where=counts > 0)  # 0 ln 0 = 0
    g = float(2 * (counts * np.log(ratio)).sum() / q)
    return g, df, float(chdtrc(df, max(g, 0.0)))


def holm(results: Sequence[TestResult]) -> list[TestResult]:
    """The results with Holm's (1979) adjusted p-values, most significant first.

    Rejecting where `p_adjusted` <= alpha keeps the chance of any false alarm among all tests at most alpha, however the
    tests depend on each other.
    """
    ordered = sorted(results, key=lambda r: r.p_value)
    worst, out = 0.0, []
    for i, r in enumerate(ordered):
        worst = max(worst, min(1.0, (len(ordered) - i) * r.p_value))
        out.append(replace(r, p_adjusted=worst))
    return out
