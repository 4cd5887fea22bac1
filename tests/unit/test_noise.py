"""The counter-based noise: published vectors, the law of what is made from them, and the shortcut against the whole."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from rollspec.sampling.coupled import accept, checked, choose, kernel_for
from rollspec.sampling.noise import block_minima, gumbel, later, philox

F = 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((F, F, F, F), F << 32 | F, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (PI, 0x299F31D0 << 32 | 0xA4093822, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_known_answers(counter: tuple[int, ...], key: int, words: tuple[int, ...]) -> None:
    """Random123's kat_vectors for philox4x32, 10 rounds."""
    assert tuple(int(w) for w in philox(*counter, np.uint64(key))) == words


def test_broadcast_equals_one_by_one() -> None:
    keys = np.array([[3], [1 << 63]], dtype=np.uint64)
    many = philox(np.arange(5), np.array([[7], [8]]), 1, 0, keys)
    assert many.shape == (4, 2, 5)
    for i, (key, c1) in enumerate([(3, 7), (1 << 63, 8)]):
        for c0 in range(5):
            assert (philox(c0, c1, 1, 0, np.uint64(key)) == many[:, i, c0]).all()


def _many(n: int, start: int = 0) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(start, start + n, dtype=np.uint64), np.arange(n, dtype=np.int64) % 97


def test_noise_is_gumbel_and_independent() -> None:
    noise = gumbel(*_many(400), vocab=384)
    assert stats.kstest(noise.ravel(), "gumbel_r").pvalue > 1e-3
    uniform = np.exp(-np.exp(-noise))
    assert uniform.min() > 0.0 and uniform.max() < 1.0
    # Neighbours in the vocabulary, within a block and across one, and in position.
    z = stats.norm.ppf(uniform)
    for a, b in [(z[:, 5], z[:, 6]), (z[:, 127], z[:, 128]), (z[:-1, 0], z[1:, 0]), (z[:, 0], z[:, 300])]:
        assert abs(np.corrcoef(a, b)[0, 1]) < 4.0 / np.sqrt(len(a))
    # The maxima of blocks, whose noise is drawn another way: all of the law's dependence would show here.
    assert stats.kstest(noise[:, :128].max(1) - np.log(128), "gumbel_r").pvalue > 1e-3
    pair = np.sort(noise[:, 128:256], axis=1)[:, -2:]  # -log of the second waiting time, given the first
    assert stats.kstest(127 * (np.exp(-pair[:, 0]) - np.exp(-pair[:, 1])), "expon").pvalue > 1e-3


def test_noise_does_not_depend_on_the_vocabulary() -> None:
    keys, positions = _many(3)
    assert (gumbel(keys, positions, 1000)[:, :300] == gumbel(keys, positions, 300)).all()


def test_one_draw_serves_blocks_and_tokens() -> None:
    keys, positions = _many(3)
    tokens = np.arange(len(keys)) % 300
    assert (block_minima(keys, positions, 3, tokens)[2] == later(keys, positions, tokens)).all()


def test_positive_times_at_the_ends_of_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollspec.sampling import noise

    keys, positions = _many(2)
    for word in (0, F):

        def constant(even: np.ndarray, odd: np.ndarray, key: np.ndarray, word: int = word) -> None:
            even[:], odd[:] = word, word

        monkeypatch.setattr(noise, "_rounds", constant)
        times, places, _ = block_minima(keys, positions, 3, np.array([0, 7]))
        assert (times > 0).all() and np.isfinite(times).all() and (places == word % 128).all()
        more = later(keys, positions, np.array([0, 7]))
        assert (more > 0).all() and np.isfinite(more).all()


LOGITS = st.sampled_from([0.0, 0.1, 1.0, 4.0, 20.0])


@settings(max_examples=60, deadline=None)
@given(
    vocab=st.integers(1, 6000),
    rows=st.integers(1, 9),
    spread=LOGITS,
    masked=st.floats(0.0, 1.0),
    temperature=st.floats(0.05, 5.0),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**31),
)
def test_choosing_by_bounds_is_choosing_by_all(
    vocab: int, rows: int, spread: float, masked: float, temperature: float, seed: int, position: int
) -> None:
    rng = np.random.default_rng(seed % 2**32)
    scores = (rng.standard_normal((rows, vocab)) * spread / temperature).astype(np.float32)
    scores[rng.random(scores.shape) < masked] = -np.inf
    scores[np.arange(rows), rng.integers(0, vocab, rows)] = 0.0
    keys = (np.uint64(seed) + np.arange(rows, dtype=np.uint64)).astype(np.uint64)
    positions = position + np.arange(rows)
    whole = (scores + gumbel(keys, positions, vocab)).argmax(1)
    assert (choose(scores, keys, positions) == whole).all()
    for i in range(rows):  # nor does the rest of the batch matter
        assert choose(scores[i : i + 1], keys[i : i + 1], positions[i : i + 1])[0] == whole[i]


def test_rows_that_cannot_be_sampled() -> None:
    keys, positions = _many(3)
    for vocab in (200, 20_000):
        scores = np.zeros((3, vocab), dtype=np.float32)
        scores[0] = np.nan  # any token, but no fault
        scores[1] = -np.inf
        scores[2, 199] = 1e4
        assert choose(scores, keys, positions).tolist()[1:] == [0, 199]


@settings(max_examples=12, deadline=None)
@given(
    vocab=st.sampled_from([2, 17, 128, 400, 2000]),
    temperature=st.floats(0.3, 3.0),
    seed=st.integers(0, 2**40),
)
def test_the_law_is_softmax(vocab: int, temperature: float, seed: int) -> None:
    """G-test of 20,000 draws at as many (key, position) pairs against softmax(logits / T)."""
    n = 20_000
    rng = np.random.default_rng(seed)
    scores = (rng.standard_normal(vocab) * 2.0 / temperature).astype(np.float32)
    probs = np.exp(scores.astype(float) - scores.max())
    probs /= probs.sum()
    keys = rng.integers(0, 2**64, n, dtype=np.uint64)
    rows = np.repeat(np.arange(0, n, 500), 500)
    tokens = np.concatenate(
        [choose(np.tile(scores, (500, 1)), keys[a : a + 500], np.arange(500) + a) for a in np.unique(rows)]
    )
    observed, expected = np.bincount(tokens, minlength=vocab).astype(float), n * probs
    order = np.argsort(-expected)  # tokens that are too rare to count share a bin
    observed, expected = observed[order], expected[order]
    common = max(1, int((expected >= 8).sum()))
    observed = np.append(observed[:common], observed[common:].sum())
    expected = np.append(expected[:common], expected[common:].sum())
    keep = expected > 0
    g = 2 * np.sum(observed[keep] * np.log(np.maximum(observed[keep], 1e-12) / expected[keep]))
    assert stats.chi2.sf(g, max(1, keep.sum() - 1)) > 1e-6


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_accept_is_the_loop_it_replaces(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    tokens, drafts, expected = [], [], []
    width = max(counts) + 1
    for n in counts:
        said = data.draw(st.lists(st.integers(0, 2), min_size=n + 1, max_size=n + 1))
        draft = data.draw(st.lists(st.integers(-1, 2), min_size=n, max_size=n))
        out = []
        for i, token in enumerate(said):
            out.append(token)
            if i == n or draft[i] != token:
                break
        expected.append(out + [-1] * (width - len(out)))
        tokens += said
        drafts += draft
    got = accept(np.array(tokens), np.array(drafts, dtype=np.int64), np.array(counts), width)
    assert got.tolist() == expected


INTERPRETED = """
import numpy as np, torch
from rollspec.sampling import noise_cuda
from rollspec.sampling.coupled import choose
rng = np.random.default_rng(0)
for vocab, rows, masks in ((5, 6, 2), (130, 6, 3), (1024, 6, 3), (3000, 6, 3), (151_936, 2, 1)):
    x = (3 * rng.standard_normal((rows, vocab))).astype(np.float32)
    keys, at = rng.integers(0, 2**64, rows, dtype=np.uint64), rng.integers(0, 2**31, rows)
    for masked in (0.5, 0.0, 0.999)[:masks]:
        x[rng.random(x.shape) < masked] = -np.inf
        x[np.arange(rows), rng.integers(0, vocab, rows)] = 0.0
        x[0, : vocab // 2] = -np.inf  # whole tiles, where there are several
        x[0, -1] = 0.0
        assert (noise_cuda.choose(torch.from_numpy(x), keys, at).numpy() == choose(x, keys, at)).all(), (vocab, masked)
# Rows of a wider tensor, as of a vocabulary that is padded.
x = np.ascontiguousarray(rng.standard_normal((3, 700)), dtype=np.float32)
keys, at = rng.integers(0, 2**64, 3, dtype=np.uint64), np.arange(3)
assert (noise_cuda.choose(torch.from_numpy(x)[:, :600], keys, at).numpy() == choose(x[:, :600], keys, at)).all()
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernel_draws_the_same() -> None:
    """In Triton's interpreter, which needs no GPU."""
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_kernel_is_used_only_where_it_draws_the_same(caplog: pytest.LogCaptureFixture) -> None:
    torch = pytest.importorskip("torch")
    cpu = torch.device("cpu")

    def right(logits: Any, keys: np.ndarray, positions: np.ndarray) -> Any:
        return torch.from_numpy(choose(logits.numpy(), keys, positions))

    def wrong(logits: Any, keys: np.ndarray, positions: np.ndarray) -> Any:
        tokens = right(logits, keys, positions)
        tokens[-1] += 1
        return tokens

    def breaks(logits: Any, keys: np.ndarray, positions: np.ndarray) -> Any:
        raise RuntimeError("no kernel image is available")

    def absent() -> Any:
        raise ImportError("libcuda.so")

    with caplog.at_level(logging.WARNING, "rollspec"):
        assert checked(lambda: right, cpu, 3000) is right and not caplog.records
        for load, reason in ((lambda: wrong, "other tokens"), (lambda: breaks, "kernel image"), (absent, "libcuda.so")):
            caplog.clear()
            assert checked(load, cpu, 3000) is None
            assert len(caplog.records) == 1 and reason in caplog.text and "slower" in caplog.text
    assert kernel_for(cpu, 3000) is None
