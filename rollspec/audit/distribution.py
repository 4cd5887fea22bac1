"""Tests of the distribution: sampled tokens against the target's probabilities, by position, token, prefix and pair.

Each family sees what the others dilute: a bias of all tokens at some positions, of one token wherever it is likely, of
one prefix's whole distribution, and randomness that is shared between draws whose single distributions are all right.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from rollspec.audit.evidence import Evidence
from rollspec.audit.statistics import (
    MAX_SKEW,
    Floats,
    Ints,
    TestResult,
    binomial_test,
    g_test,
    holm,
    moment_test,
)

BINS = 20
MIN_BUCKET = 200  # tokens from which on a range of positions is tested by itself
MAX_TOKENS = 64  # token ids tested one by one
MIN_TOKEN_COUNT = 25.0  # expected occurrences of a token id tested by itself
TAILS = (0.01, 0.001, 0.0001)  # least likely shares of the target's mass
CHANCE = 0.9  # with which a fault is found that counts as detectable
MAX_PREFIXES = 16  # exact prefixes that are tested: those with most samples and more than one likely token


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


def distribution_tests(evidence: Evidence) -> list[TestResult]:
    """Every test of the sampled tokens against the target's distribution, Holm-adjusted, most significant first."""
    if not evidence.seen.all():
        raise ValueError(f"{int((~evidence.seen).sum())} sampled tokens were not given the reference's probabilities")
    families = (_by_position, _tails, _tokens, _prefixes, _independence)
    return holm([test for family in families for test in family(evidence)])


def detectable(evidence: Evidence, tests: int, alpha: float) -> Power | None:
    """The smallest faults that so many tests at a family-wise `alpha` find nine times in ten among the tokens of
    `evidence`; None where there are no tests.

    Planted faults move the means of the z-tests by a known amount per unit of fault, and the tests' variances are
    known, so the size that reaches the threshold (Holm's strictest, alpha over the number of tests) is a line of
    algebra each. Other tests may find the same fault earlier: these sizes are upper bounds. `benchmarks/audit_power.py`
    simulates them.
    """
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


def buckets(position: Ints, least: int = MIN_BUCKET) -> list[tuple[int, int]]:
    """Ranges [a, b) of positions: singly up to 8, then doubling, each merged with the next until it holds `least`."""
    if len(position) == 0:
        return []
    end = int(position.max()) + 1
    edges = [*range(min(8, end) + 1)]
    while edges[-1] < end:
        edges.append(min(edges[-1] * 2, end))
    counts = np.bincount(position, minlength=end)
    out: list[tuple[int, int]] = []
    start = 0
    for b in edges[1:]:
        if counts[start:b].sum() >= least:
            out.append((start, b))
            start = b
    if start < end and out:
        out[-1] = (out[-1][0], end)
    return out


def _by_position(e: Evidence) -> Iterator[TestResult]:
    ranges = buckets(e.position)
    everything = [(0, int(e.position.max()) + 1)] if len(e.position) else []
    for a, b in everything + (ranges if len(ranges) > 1 else []):
        rows = (e.position >= a) & (e.position < b)
        n = int(rows.sum())
        where = f"position {a}" if b == a + 1 else f"positions {a}-{b - 1}"
        where = "all positions" if (a, b) == everything[0] else where
        variance, third = e.surprisal_variance[rows].sum(), e.surprisal_third[rows].sum()
        yield from _sum("surprisal", where, n, -e.log_prob[rows].sum(), e.entropy[rows].sum(), variance, third)
        q = e.p_max[rows]
        variance, third = (q * (1 - q)).sum(), (q * (1 - q) * (1 - 2 * q)).sum()
        yield from _sum("most likely token", where, n, e.is_argmax[rows].sum(), q.sum(), variance, third, step=1)
        for name, u in (("token order", e.pit), ("rank order", e.rank_pit)):
            observed = np.bincount(np.minimum((u[rows] * BINS).astype(int), BINS - 1), minlength=BINS)
            g, df, p = g_test(observed, np.full(BINS, 1 / BINS))
            yield TestResult(f"uniformity in {name}", where, n, g, df, p)


def _tails(e: Evidence) -> Iterator[TestResult]:
    """Tokens from the far tail of the target: what a broken sampler emits now and then, too few for a bin of 5 %."""
    n = len(e.rank_pit)
    for share in TAILS:
        if n * share >= 1:
            count = int((e.rank_pit > 1 - share).sum())
            z, p = binomial_test(count, n, share)
            yield TestResult("rare tokens", f"last {share:g} of the mass", n, z, None, p)


def _tokens(e: Evidence) -> Iterator[TestResult]:
    observed, mean, variance, third = e.token_moments
    common = np.argsort(-mean, kind="stable")[:MAX_TOKENS]
    for i in common[mean[common] >= MIN_TOKEN_COUNT]:
        found = (observed[i], mean[i], variance[i], third[i])
        yield from _sum("token frequency", f"token {i}", int(e.start[-1]), *found, step=1)


def _prefixes(e: Evidence) -> Iterator[TestResult]:
    tables = sorted((t for t in e.tables.values() if len(t.observed) > 1), key=lambda t: -t.n)
    for i, t in enumerate(tables[:MAX_PREFIXES]):
        g, df, p = g_test(t.observed, t.probabilities)
        yield TestResult("exact prefix", f"prefix {i} at position {t.position}", t.n, g, df, p)


def _independence(e: Evidence) -> Iterator[TestResult]:
    """Equal seeds, shared noise and duplicated samples leave every single distribution right; only pairs show them."""
    lengths = np.diff(e.start)
    # [S, L] centred, unit variance; NaN past the end
    table = np.full((len(lengths), int(lengths.max(initial=0))), np.nan)
    for s, k in enumerate(lengths):
        table[s, :k] = (e.pit[e.start[s] : e.start[s] + k] - 0.5) * np.sqrt(12)
    yield from _correlation("within a response", table[:, :-1] * table[:, 1:])
    member: dict[tuple[int, int], list[int]] = {}
    for s, key in enumerate(zip(e.samples.prompt.tolist(), e.samples.round.tolist(), strict=True)):
        member.setdefault(key, []).append(s)
    siblings = [pair for group in member.values() for pair in itertools.pairwise(group)]
    rounds = [
        pair
        for (prompt, r), group in member.items()
        for pair in zip(group, member.get((prompt, r + 1), ()), strict=False)
    ]
    for where, pairs in (("between siblings", siblings), ("between rounds", rounds)):
        if pairs:
            a, b = (np.array(side) for side in zip(*pairs, strict=True))
            yield from _correlation(where, table[a] * table[b])


def _correlation(where: str, products: Floats) -> Iterator[TestResult]:
    found = products[~np.isnan(products)]
    if len(found) >= MIN_BUCKET:
        # Each product has mean 0 and variance 1, and is uncorrelated with the others.
        yield from _sum("independence", where, len(found), found.sum(), 0.0, len(found), 0.0)


def _sum(
    name: str, where: str, n: int, value: float, mean: float, variance: float, third: float, step: float = 0.0
) -> Iterator[TestResult]:
    """The test of a sum by its moments, where it holds enough randomness for one."""
    if variance > 1e-9 and abs(third) / variance**1.5 <= MAX_SKEW:
        z, p = moment_test(value, mean, variance, third, step)
        yield TestResult(name, where, n, z, None, p)
