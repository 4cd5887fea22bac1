"""Coupled sampling: every token is argmax(logits / T + Gumbel(key, position, token)), whether or not it was drafted.

A draft token is accepted while it equals that argmax, and the first that differs is replaced by it. So drafts decide
how many tokens a step yields and never which: any selection of drafts is exact, and the text is the same with any
drafter, any K and none. Pure: torch and numpy, no engine.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rollspec.sampling.noise import BLOCK, Ints, Words, block_minima, later

if TYPE_CHECKING:
    import torch

CHUNK = 1 << 14
"""Blocks looked at together: what stays in a core's cache."""


def sample(logits: torch.Tensor, keys: Words, positions: Ints) -> torch.Tensor:
    """One token per row: an exact draw from softmax(logits), the same for the same (logits, key, position).

    Args:
        logits: [n, vocab] float32, temperature and masks applied; -inf tokens are never drawn.
        keys: [n] noise keys. positions: [n] index of the drawn token in the whole sequence.

    Returns:
        [n] int64 on the device of `logits`.
    """
    import torch

    if logits.is_cuda and find_spec("triton") is not None:
        from rollspec.sampling import noise_cuda

        return noise_cuda.choose(logits, keys, positions)
    return torch.from_numpy(choose(logits.cpu().numpy(), keys, positions)).to(logits.device)


def choose(scores: npt.NDArray[np.float32], keys: Words, positions: Ints) -> Ints:
    """argmax(scores + noise.gumbel(...)) per row, computing noise only for blocks that can win.

    Args:
        scores: [n, vocab]. keys, positions: [n].

    Returns:
        [n] tokens, the lowest of equals; 0 where a row has NaN or nothing but -inf.
    """
    n, vocab = scores.shape
    if missing := -vocab % BLOCK:
        scores = np.pad(scores, ((0, 0), (0, missing)), constant_values=-np.inf)
    blocks = scores.shape[1] // BLOCK
    scores = scores.reshape(n, blocks, BLOCK)
    out = np.zeros(n, dtype=np.int64)
    rows = max(1, CHUNK // blocks)
    for at in range(0, n, rows):
        part = slice(at, at + rows)
        _choose(scores[part], keys[part], positions[part], out[part])
    return out


def _choose(x: npt.NDArray[np.float32], keys: Words, positions: Ints, out: Ints) -> None:
    """`choose` for [n, blocks, 128] scores, into `out`."""
    times, holder = block_minima(keys, positions, x.shape[1])
    bound = -np.log(times)  # of the noise in a block; its holder has exactly this
    held = np.take_along_axis(x, holder[..., None], -1)[..., 0] + bound
    row, block = np.nonzero(x.max(-1) + bound >= held.max(1, keepdims=True))
    if not len(row):
        return
    more = later(keys[row], positions[row], block)
    more[np.arange(len(row)), holder[row, block]] = 0.0
    found = x[row, block] - np.log(times[row, block][:, None] + more)  # [candidates, 128]
    place = found.argmax(1)
    value = found[np.arange(len(row)), place]
    first = np.flatnonzero(np.diff(row, prepend=-1))  # candidates come sorted by row
    best = np.maximum.reduceat(value, first)
    wins = np.flatnonzero(value == np.repeat(best, np.diff(first, append=len(row))))[::-1]  # the lowest is written last
    out[row[wins]] = block[wins] * BLOCK + place[wins]


def accept(tokens: Ints, drafts: Ints, counts: Ints, width: int) -> Ints:
    """What a verify step emits.

    Args:
        tokens: [sum(counts + 1)] coupled tokens, request by request: one per draft token and one more.
        drafts: [sum(counts)] draft tokens, request by request; negative ones are never accepted.
        counts: [batch] draft tokens per request, each below `width`.
        width: columns of the result.

    Returns:
        [batch, width]: each request's tokens up to the first that differs from its draft, then -1.
    """
    batch = len(counts)
    at = np.arange(width)
    rows = np.full((batch, width), -1, dtype=np.int64)
    rows[at <= counts[:, None]] = tokens
    guesses = np.full((batch, width), -2, dtype=np.int64)
    guesses[at < counts[:, None]] = drafts
    emitted = 1 + np.cumprod(rows == guesses, axis=1).sum(1)
    rows[at >= emitted[:, None]] = -1
    return rows
