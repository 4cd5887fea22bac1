"""SPEC-RL's rule, and that the distance it is said to have is the one it has."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.lenient_distance import distribution, total_variation
from rollspec.sampling.lenient_reuse import keep_probability, kept


def _pair(seed: int, vocab: int, drift: float) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    logits = 2.0 * rng.standard_normal(vocab)
    moved = logits + drift * rng.standard_normal(vocab)
    p, q = np.exp(moved), np.exp(logits)
    return p / p.sum(), q / q.sum()


def test_cut_is_the_first_rejected_token() -> None:
    log_old, log_new = np.zeros(4), np.log(np.array([1.0, 0.5, 1.0, 1.0]))
    low, high = np.array([0.9, 0.4, 0.9, 0.9]), np.array([0.9, 0.6, 0.9, 0.9])
    assert kept(log_new, log_old, high) == 1
    assert kept(log_new, log_old, low) == kept(log_new, log_old, high, bias=np.log(1.5)) == 4
    assert kept(log_new[:0], log_old[:0], low[:0]) == 0


def test_impossible_tokens_are_never_kept() -> None:
    log_new, log_old = np.array([-np.inf, -np.inf, np.nan]), np.array([-1.0, -np.inf, -1.0])
    assert keep_probability(log_new, log_old, bias=50.0).tolist() == [0.0, 0.0, 0.0]


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.integers(2, 40),
    drift=st.floats(0.0, 3.0),
    bias=st.floats(-1.0, 2.0),
)
def test_distribution_and_distance(seed: int, vocab: int, drift: float, bias: float) -> None:
    p, q = _pair(seed, vocab, drift)
    out = distribution(p, q, bias)
    assert np.isclose(out.sum(), 1.0) and (out >= -1e-12).all()
    assert np.isclose(total_variation(p, q, bias), 0.5 * np.abs(out - p).sum())
    ell = np.exp(bias)
    overlap = np.minimum(ell * p, q)
    assert np.isclose(total_variation(p, q, bias), 0.5 * np.abs(overlap - overlap.sum() * p).sum())
    assert total_variation(p, p, bias) < 1e-12


def test_not_exact_at_bias_0_and_simulated() -> None:
    p, q = _pair(1, 6, 1.0)
    assert total_variation(p, q) > 0.01
    rng = np.random.default_rng(0)
    n = 200_000
    old = rng.choice(6, n, p=q)
    cut = rng.random(n) <= keep_probability(np.log(p[old]), np.log(q[old]))
    said = np.where(cut, old, rng.choice(6, n, p=p))
    assert np.abs(np.bincount(said, minlength=6) / n - distribution(p, q)).max() < 0.005
