"""The audit's statistics on cases with known answers."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from audit_cases import evidence
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from rollspec.audit import statistics as audit_tests
from rollspec.audit.distribution import buckets, distribution_tests
from rollspec.audit.evidence import AuditError, Evidence, samples_from
from rollspec.audit.reference import Reference
from rollspec.audit.statistics import TestResult
from rollspec.audit.verdict import AuditResult

# ---- elementary tests


@pytest.mark.parametrize("observed", [30, 40, 60, 75])
def test_a_count_is_tested_as_the_binomial_would(observed: int) -> None:
    n, p = 1000, 0.05
    variance = n * p * (1 - p)
    _, got = audit_tests.moment_test(observed, n * p, variance, variance * (1 - 2 * p), step=1)
    distribution = stats.binom(n, p)
    exact = 2 * min(distribution.cdf(observed), distribution.sf(observed - 1), 0.5)
    assert 0.8 * exact < got < 2.2 * exact  # never much below: that would be a false alarm


def test_a_skewed_sum_does_not_alarm_where_a_z_test_would() -> None:
    """31 events of a Poisson distribution with mean 12: far out for a normal distribution, less so for itself."""
    z, p = audit_tests.moment_test(31, 12, 12, 12, step=1)
    assert 2 * stats.norm.sf(z) < 1e-7 < 2e-6 < p
    assert p == pytest.approx(2 * stats.poisson(12).sf(30), rel=0.5)


def test_a_binomial_count_is_tested_exactly() -> None:
    for count in (0, 3, 20, 41):
        _, got = audit_tests.binomial_test(count, 20_000, 1e-3)
        distribution = stats.binom(20_000, 1e-3)
        assert got == pytest.approx(min(1.0, 2 * min(distribution.cdf(count), distribution.sf(count - 1))))


def test_a_certain_sum_must_be_met() -> None:
    assert audit_tests.moment_test(3, 3, 0, 0) == (0.0, 1.0)
    assert audit_tests.moment_test(4, 3, 0, 0)[1] == 0.0


def test_g_test_is_scipys_up_to_williams_correction() -> None:
    observed, p = np.array([30, 50, 20]), np.array([0.25, 0.5, 0.25])
    g, df, got = audit_tests.g_test(observed, p)
    want = stats.power_divergence(observed, p * 100, lambda_="log-likelihood")
    assert df == 2
    assert g == pytest.approx(want.statistic, rel=0.02)
    assert g < want.statistic
    assert got == pytest.approx(want.pvalue, rel=0.05)
    assert audit_tests.g_test([10], [1.0])[2] == 1.0


@given(st.integers(2, 60), st.integers(1, 2000), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_merged_cells_all_expect_enough(v: int, n: int, seed: int) -> None:
    p = np.random.default_rng(seed).dirichlet(np.full(v, 0.3))
    cells = audit_tests.merge_rare(p, n)
    merged = np.bincount(cells, weights=p)
    assert merged.sum() == pytest.approx(1)
    if len(merged) > 1:
        assert (merged[merged > 0] * n).min() >= audit_tests.MIN_EXPECTED - 1e-6


def test_holm_by_hand() -> None:
    p = [0.01, 0.04, 0.03]
    found = audit_tests.holm([TestResult("t", str(i), 1, 0, None, x) for i, x in enumerate(p)])
    assert [t.p_value for t in found] == [0.01, 0.03, 0.04]
    assert [t.p_adjusted for t in found] == pytest.approx([0.03, 0.06, 0.06])


def test_buckets_cover_every_position_once() -> None:
    position = np.concatenate([np.arange(50) for _ in range(100)])
    found = buckets(position, least=200)
    assert found[0][0] == 0 and found[-1][1] == 50
    assert all(a[1] == b[0] for a, b in itertools.pairwise(found))
    assert all(((position >= a) & (position < b)).sum() >= 200 for a, b in found)
    assert buckets(np.arange(10), least=200) == []


# ---- evidence


def test_statistics_of_one_token_by_hand() -> None:
    p = np.array([0.5, 0.2, 0.3])
    e = evidence([[1]], p)
    h = -(p * np.log(p)).sum()
    assert e.entropy[0] == pytest.approx(h)
    assert e.surprisal_variance[0] == pytest.approx((p * (-np.log(p) - h) ** 2).sum())
    assert e.log_prob[0] == pytest.approx(np.log(0.2))
    assert not e.is_argmax[0] and e.p_max[0] == 0.5
    assert 0.5 <= e.pit[0] <= 0.7  # token 0 lies below it
    assert 0.8 <= e.rank_pit[0] <= 1.0  # tokens 0 and 2 are likelier
    np.testing.assert_allclose(e.token_moments[:2], [[0, 1, 0], p])


def test_chunks_of_any_size_give_the_same() -> None:
    rng = np.random.default_rng(0)
    distribution, row = rng.dirichlet(np.ones(6), size=9), rng.integers(0, 6, 9).tolist()
    whole, parts = (Evidence(samples_from([row], [0]), 6, np.random.default_rng(1)) for _ in range(2))
    whole.add(0, np.log(distribution))
    for first in (0, 4, 7):
        parts.add(0, np.log(distribution[first : {0: 4, 4: 7, 7: 9}[first]]), first)
    for name in ("log_prob", "entropy", "surprisal_variance", "surprisal_third", "p_max", "token_moments"):
        np.testing.assert_allclose(getattr(whole, name), getattr(parts, name))


def test_equal_prefixes_share_a_table() -> None:
    e = evidence([[0, 1]] * 60 + [[1, 1]] * 60, np.array([0.5, 0.5]))
    assert sorted((t.position, t.n) for t in e.tables.values()) == [(0, 120), (1, 60), (1, 60)]
    assert e.tables[0].observed.tolist() == [60, 60]


def test_a_token_of_probability_zero_fails() -> None:
    with np.errstate(divide="ignore"):
        e = evidence([[0, 1, 2] * 100], np.array([0.5, 0.5, 0.0]))
    assert distribution_tests(e)[0].p_value < 1e-12


@pytest.mark.parametrize(
    ("log_probs", "says"),
    [
        (np.full((1, 3), np.nan), "NaN or do not sum to one"),
        (np.zeros((1, 3)), "do not sum to one"),
        (np.log(np.full((1, 4), 0.25)), "a vocabulary of 3"),
    ],
)
def test_a_useless_reference_is_refused(log_probs: np.ndarray, says: str) -> None:
    with pytest.raises(AuditError, match=says):
        Evidence(samples_from([[1]], [0]), 3, np.random.default_rng(0)).add(0, log_probs)


def test_missing_probabilities_are_an_error() -> None:
    with pytest.raises(ValueError, match="2 sampled tokens"):
        distribution_tests(Evidence(samples_from([[1, 2]], [0]), 3, np.random.default_rng(0)))


def test_nothing_sampled_is_no_test() -> None:
    e = Evidence(samples_from([[]], [0]), 3, np.random.default_rng(0))
    assert distribution_tests(e) == []
    assert "too few" in AuditResult([], 0).reasons[0]


def test_distributions_are_worked_on_in_blocks() -> None:
    """A real model's are gigabytes: whole copies for every step of the arithmetic took most of an audit's time."""
    import tracemalloc

    import torch

    vocab, n = 40_000, 100
    target: Any = object.__new__(Reference)
    target.vocab, target.temperature = vocab, 1.0
    target._logits = lambda prompt, responses: torch.zeros(1, n, vocab)  # 16 MB
    evidence = Evidence(samples_from([[5] * n], [0]), vocab, np.random.default_rng(0))
    tracemalloc.start()
    try:
        target.fill(evidence, ((1,),))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20, peak
    assert evidence.seen.all() and evidence.entropy == pytest.approx(np.log(vocab))


def test_float32_says_what_float64_says() -> None:
    """Half the time on a real vocabulary, whose many tiny probabilities must not get lost beside the large ones."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(8, 49_152)) * 4
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    tokens = [rng.choice(len(row), p=np.exp(row) / np.exp(row).sum()) for row in log_probs]
    found = []
    for kind in (np.float32, np.float64):
        e = Evidence(samples_from([tokens], [0]), logits.shape[1], np.random.default_rng(0))
        for i, row in enumerate(log_probs):  # row by row: the same random numbers
            e.add(0, row[None].astype(kind), first=i)
        found.append(e)
    for name in ("log_prob", "entropy", "flat", "surprisal_variance", "p_max", "pit", "rank_pit", "is_argmax"):
        assert getattr(found[0], name) == pytest.approx(getattr(found[1], name), abs=2e-5), name
    assert np.allclose(found[0].token_moments, found[1].token_moments, atol=1e-6)
