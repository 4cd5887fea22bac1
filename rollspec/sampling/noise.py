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

_OF_BLOCKS, _OF_TOKENS = np.uint64(0), np.uint64(1)  # third counter word: what the draw is for


def philox(c0: Any, c1: Any, c2: Any, c3: Any, key: Words) -> Words:
    """Philox4x32-10 (Random123): four random 32-bit words per counter.

    Args:
        c0, c1, c2, c3: counter words, each below 2^32, broadcastable against each other and `key`.
        key: 64-bit keys, low word first.

    Returns:
        [4, ...] words below 2^32, as uint64.
    """
    shape = np.broadcast_shapes(*map(np.shape, (c0, c1, c2, c3, key)))
    even, odd = np.empty((2, *shape), dtype=np.uint64), np.empty((2, *shape), dtype=np.uint64)
    even[0], even[1], odd[0], odd[1] = c0, c2, c1, c3
    key = np.broadcast_to(np.asarray(key, dtype=np.uint64), shape)
    _rounds(even, odd, np.stack([key & _LOW, key >> _32]))
    return np.stack([even[0], odd[0], even[1], odd[1]])


def _rounds(even: Words, odd: Words, key: Words) -> None:
    """Ten rounds in place. even: [2, ...] counter words 0 and 2; odd: 1 and 3. key: [2, ...], its halves."""
    ones = (1,) * (even.ndim - 1)
    keys = (key + _BUMPS.reshape(ROUNDS, 2, *ones)) & _LOW
    m = _M.reshape(2, *ones)
    product = np.empty_like(even)
    crossed = product[::-1]  # each lane takes the other's product
    for r in range(ROUNDS):
        np.multiply(even, m, out=product)  # below 2^64: nothing is lost
        np.right_shift(crossed, _32, out=even)
        np.bitwise_xor(even, odd, out=even)
        np.bitwise_xor(even, keys[r], out=even)
        np.bitwise_and(crossed, _LOW, out=odd)


def _draw(first: Words, what: Any, keys: Words, positions: Ints) -> tuple[Words, Words]:
    """Words (0, 2) and (1, 3) of counters (first, position, what, 0), each [2, n, counters].

    Args:
        first: [counters] or [n, counters]. what: scalar or [counters]. keys, positions: [n].
    """
    shape = (2, len(keys), first.shape[-1])
    even, odd = np.empty(shape, dtype=np.uint64), np.empty(shape, dtype=np.uint64)
    even[0], even[1] = first, what
    odd[0], odd[1] = positions[:, None], 0
    _rounds(even, odd, np.array([keys & _LOW, keys >> _32])[..., None])
    return even, odd


def block_minima(keys: Words, positions: Ints, blocks: int, tokens: Ints) -> tuple[Floats, Ints, Floats]:
    """The smallest waiting time of each block, and which of its 128 tokens holds it; and `later` of one token per key.

    One draw, because where there is little of both, the steps of a draw are what it costs.

    Args:
        keys: [n] noise keys. positions: [n] positions in the sequence, below 2^32. blocks: how many, from token 0 on.
        tokens: [n].

    Returns:
        [n, blocks] times ~ Exp(128), positive, on a grid of 2^-52; [n, blocks] places 0..127; [n] times ~ Exp(1).
    """
    n, pairs = len(keys), (blocks + 1) // 2
    counters = np.empty((n, pairs + 1), dtype=np.uint64)
    counters[:, :pairs], counters[:, pairs] = np.arange(pairs), tokens // 4
    even, odd = _draw(counters, np.repeat([_OF_BLOCKS, _OF_TOKENS], [pairs, 1]), keys, positions)
    times, holder = _minima(even[..., :pairs], odd[..., :pairs], blocks)
    return times, holder, _later(even[..., pairs:], odd[..., pairs:])[np.arange(n), tokens % 4]


def _minima(even: Words, odd: Words, blocks: int) -> tuple[Floats, Ints]:
    """A counter serves two blocks: 52 bits for the time and 7 for the place, each."""
    n = even.shape[1]
    high = even.transpose(1, 2, 0).reshape(n, -1)[:, :blocks]
    low = odd.transpose(1, 2, 0).reshape(n, -1)[:, :blocks]
    bits = (high << np.uint64(20)) | (low >> np.uint64(12))
    times: Floats = -np.log((bits + 0.5) * 2.0**-52) / BLOCK
    return times, (low & np.uint64(BLOCK - 1)).astype(np.int64)


def later(keys: Words, positions: Ints, tokens: Ints) -> Floats:
    """How much longer than its block's smallest a token waits, were it not the holder.

    Args:
        keys, positions: [n], as above. tokens: [n] one token for each.

    Returns:
        [n] times ~ Exp(1), positive.
    """
    counters = tokens.astype(np.uint64)[:, None] // np.uint64(4)
    even, odd = _draw(counters, _OF_TOKENS, keys, positions)
    out: Floats = _later(even, odd)[np.arange(len(tokens)), tokens % 4]
    return out


def _later(even: Words, odd: Words) -> Floats:
    """Token 4 i + j has word j of counter i: [n, 4 * counters]."""
    n, counters = even.shape[1:]
    words = np.empty((n, counters, 4), dtype=np.uint64)
    words[..., 0], words[..., 1], words[..., 2], words[..., 3] = even[0], odd[0], even[1], odd[1]
    out: Floats = -np.log((words.reshape(n, 4 * counters) + 0.5) * 2.0**-32)
    return out


def gumbel(keys: Words, positions: Ints, vocab: int) -> Floats:
    """All of the noise, [n, vocab]: the plain definition that `coupled.choose` must agree with."""
    n, blocks = len(keys), -(-vocab // BLOCK)
    pairs = (blocks + 1) // 2
    tokens = blocks * BLOCK // 4
    counters = np.concatenate([np.arange(pairs, dtype=np.uint64), np.arange(tokens, dtype=np.uint64)])
    even, odd = _draw(counters, np.repeat([_OF_BLOCKS, _OF_TOKENS], [pairs, tokens]), keys, positions)
    times, holder = _minima(even[..., :pairs], odd[..., :pairs], blocks)
    more = _later(even[..., pairs:], odd[..., pairs:]).reshape(n, blocks, BLOCK)
    more[np.arange(n)[:, None], np.arange(blocks), holder] = 0.0
    out: Floats = -np.log(times[..., None] + more).reshape(n, blocks * BLOCK)
    return out[:, :vocab]
