"""Gumbel noise that is a function of (key, position, token) alone, from the counter-based generator Philox4x32-10.

With it `argmax(logits / T + noise)` is an exact draw from softmax(logits / T) and depends on nothing else: not on the
batch, not on what was drafted, not on how often a step was computed (Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3", SC 2011; the Gumbel-max trick).

The noise is laid out so that a large vocabulary needs little of it. A token's exponential waiting time is
E = -log(uniform), its Gumbel noise -log E. Tokens come in blocks of 128; a block's smallest waiting time m ~ Exp(128)
and the token that holds it (uniform) are drawn directly, and every other token of the block waits m plus an Exp(1) of
its own. That is the law of 128 independent waiting times, by the memoryless property, and it gives a bound: no token of
a block has noise above -log m. `coupled.choose` computes the rest of a block only where that bound can win.

Everything is numpy on the CPU: at these sizes its operations cost a quarter of torch's. `noise_cuda` has the kernel.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Words: TypeAlias = npt.NDArray[np.uint64]
Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]

BLOCK = 128
"""Tokens per block."""

ROUNDS = 10
_M = np.array([0xD2511F53, 0xCD9E8D57], dtype=np.uint64)  # multipliers
_W = np.array([0x9E3779B9, 0xBB67AE85], dtype=np.uint64)  # key schedule
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_BUMPS = np.arange(ROUNDS, dtype=np.uint64)[:, None] * _W  # [rounds, 2]

BLOCKS, TOKENS = 0, 1  # third counter word: what the draw is for


def philox(c0: Any, c1: Any, c2: Any, c3: Any, key: Words) -> Words:
    """Philox4x32-10 (Random123): four random 32-bit words per counter.

    Args:
        c0, c1, c2, c3: counter words, each below 2^32, broadcastable against each other and `key`.
        key: 64-bit keys, low word first.

    Returns:
        [4, ...] words below 2^32, as uint64.
    """
    shape = np.broadcast_shapes(*map(np.shape, (c0, c1, c2, c3, key)))
    key = np.asarray(key, dtype=np.uint64)
    halves = np.stack([key & _LOW, key >> _32])  # [2, ...]
    halves = halves.reshape(2, *(1,) * (len(shape) - key.ndim), *key.shape)
    keys = (halves + _BUMPS.reshape(ROUNDS, 2, *(1,) * len(shape))) & _LOW
    m = _M.reshape(2, *(1,) * len(shape))
    even, odd = np.empty((2, *shape), dtype=np.uint64), np.empty((2, *shape), dtype=np.uint64)
    even[0], even[1], odd[0], odd[1] = c0, c2, c1, c3
    product = np.empty_like(even)
    crossed = product[::-1]  # each lane takes the other's product
    for r in range(ROUNDS):
        np.multiply(even, m, out=product)  # below 2^64: nothing is lost
        np.right_shift(crossed, _32, out=even)
        np.bitwise_xor(even, odd, out=even)
        np.bitwise_xor(even, keys[r], out=even)
        np.bitwise_and(crossed, _LOW, out=odd)
    return np.stack([even[0], odd[0], even[1], odd[1]])


def block_minima(keys: Words, positions: Ints, blocks: int) -> tuple[Floats, Ints]:
    """The smallest waiting time of each block, and which of its 128 tokens holds it.

    Args:
        keys: [n] noise keys. positions: [n] positions in the sequence, below 2^32. blocks: how many, from token 0 on.

    Returns:
        [n, blocks] times ~ Exp(128), positive, on a grid of 2^-52; [n, blocks] places 0..127.
    """
    pairs = (blocks + 1) // 2  # a counter serves two blocks: 52 bits for the time and 7 for the place, each
    w = philox(np.arange(pairs, dtype=np.uint64), _column(positions), BLOCKS, 0, keys[:, None])
    high = np.stack([w[0], w[2]], -1).reshape(len(keys), -1)[:, :blocks]
    low = np.stack([w[1], w[3]], -1).reshape(len(keys), -1)[:, :blocks]
    bits = (high << np.uint64(20)) | (low >> np.uint64(12))
    times = -np.log((bits + 0.5) * 2.0**-52) / BLOCK
    return times, (low & np.uint64(BLOCK - 1)).astype(np.int64)


def later(keys: Words, positions: Ints, blocks: Ints) -> Floats:
    """How much longer than the block's smallest each token waits, were it not the holder.

    Args:
        keys, positions: [n], as above. blocks: [n] one block for each.

    Returns:
        [n, 128] times ~ Exp(1), positive.
    """
    first = blocks.astype(np.uint64)[:, None] * np.uint64(BLOCK // 4)
    w = philox(first + np.arange(BLOCK // 4, dtype=np.uint64), _column(positions), TOKENS, 0, keys[:, None])
    words = np.moveaxis(w, 0, -1).reshape(len(keys), BLOCK)  # token 4 i + j has word j of counter i
    out: Floats = -np.log((words + 0.5) * 2.0**-32)
    return out


def gumbel(keys: Words, positions: Ints, vocab: int) -> Floats:
    """All of the noise, [n, vocab]: the plain definition that `coupled.choose` must agree with."""
    n, blocks = len(keys), -(-vocab // BLOCK)
    times, holder = block_minima(keys, positions, blocks)
    each = np.tile(np.arange(blocks), n)
    more = later(np.repeat(keys, blocks), np.repeat(positions, blocks), each).reshape(n, blocks, BLOCK)
    np.put_along_axis(more, holder[..., None], 0.0, -1)
    out: Floats = -np.log(times[..., None] + more).reshape(n, blocks * BLOCK)
    return out[:, :vocab]


def _column(positions: Ints) -> Words:
    return positions.astype(np.uint64)[:, None]
