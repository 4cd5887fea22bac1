"""V2's noise, bit for bit: murmur3 Gumbel noise per (seed, position, token) and the Philox uniforms of rejection.

Same integer arithmetic and same float32 steps as `vllm/v1/worker/gpu/sample/gumbel.py` and Triton's `tl.rand`, so a
request draws the same tokens here and under Triton's interpreter.
"""

from __future__ import annotations

import numpy as np

from .memory import arange

U32 = np.uint32
# gumbel.py: keeps the noise of a draft disjoint from the noise that verifies it.
DRAFT_SALT = 1 << 30
SECOND_DOMAIN = 0x9E3779B9
# gumbel.py: the smallest positive value of `tl.rand`.
RAND_MIN = np.float32(4.6566127342e-10)
MASK32 = 0xFFFFFFFF


def _scrambled(key: np.ndarray) -> np.ndarray:
    """A word as murmur3 mixes it in: uint32 in, uint32 out."""
    key = key * U32(0xCC9E2D51)
    return (key << U32(15) | key >> U32(17)) * U32(0x1B873593)


def _prefix(seeds: np.ndarray, positions: np.ndarray, domain: int) -> np.ndarray:
    """The hash state before the token is mixed in: uint32 [rows] for int64 seeds and positions."""
    words = np.empty((3, len(seeds)), dtype=np.int64)
    words[0], words[1], words[2] = seeds, seeds >> 32, positions
    h = U32(domain)
    for key in _scrambled(words.astype(U32)):
        h = h ^ key
        h = (h << U32(13) | h >> U32(19)) * U32(5) + U32(0xE6546B64)
    return np.asarray(h)


class _TokenKeys:
    """The part of the hash that depends on the token alone, kept for the largest vocabulary seen."""

    keys = np.zeros(0, dtype=U32)

    @classmethod
    def of(cls, vocab_size: int) -> np.ndarray:
        if len(cls.keys) < vocab_size:
            cls.keys = _scrambled(arange(vocab_size).astype(U32))
        return cls.keys[:vocab_size]


def hash32(seeds: np.ndarray, positions: np.ndarray, vocab_size: int, domain: int = 0) -> np.ndarray:
    """murmur3 of (seed, position, token): uint32 [rows, vocab_size] for int64 seeds and positions [rows]."""
    h = _prefix(seeds, positions, domain)[:, None] ^ _TokenKeys.of(vocab_size)
    scratch = h >> U32(19)
    h <<= U32(13)
    h |= scratch
    h *= U32(5)
    h += U32(0xE6546B64)
    h ^= U32(16)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        np.right_shift(h, U32(shift), out=scratch)
        h ^= scratch
        h *= U32(factor)
    np.right_shift(h, U32(16), out=scratch)
    h ^= scratch
    return h


def gumbel(seeds: np.ndarray, positions: np.ndarray, vocab_size: int, fp64: bool = False) -> np.ndarray:
    """Gumbel noise [rows, vocab_size], float32, or float64 with `fp64`."""
    random = hash32(seeds, positions, vocab_size)
    if fp64:
        high = hash32(seeds, positions, vocab_size, SECOND_DOMAIN).astype(np.uint64)
        uniform = (((high << np.uint64(32)) | random) >> np.uint64(11)).astype(np.float64)
        uniform += 0.5
        uniform *= 1.1102230246251565e-16
        uniform[uniform == 1.0] -= 1.1102230246251565e-16
        return -np.log(-np.log(uniform))
    return gumbel_from_hash(random)


def gumbel_from_hash(random: np.ndarray) -> np.ndarray:
    """float32 Gumbel noise of uint32 hashes of any shape, with gumbel.py's order of operations."""
    high = (random >> U32(16)).astype(np.float32)
    high *= np.float32(1.52587890625e-05)
    u = (random & U32(0xFFFF)).astype(np.float32)
    u += np.float32(0.5)
    u *= np.float32(2.3283064365386963e-10)
    u += high
    return -np.log(-_log1p_neg(u))


def _log1p_neg(value: np.ndarray) -> np.ndarray:
    """log(1 - value): gumbel.py's series below 0.25, the logarithm above."""
    small = np.flatnonzero(value.reshape(-1) < 0.25)
    out = np.subtract(np.float32(1), value)
    np.maximum(out, np.float32(5.960464477539063e-08), out=out)
    np.log(out, out=out)
    v = value.reshape(-1)[small]
    polynomial = v * np.float32(1.0 / 8.0)
    for n in (7, 6, 5, 4, 3, 2):
        polynomial += np.float32(1.0 / n)
        polynomial *= v
    polynomial += np.float32(1.0)
    out.reshape(-1)[small] = -v * polynomial
    return out


def uniform(seeds: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """`max(tl.rand(seed, offset), RAND_MIN)`: float32 [n] for int64 seeds and offsets [n] (Philox-4x32-10)."""
    low, shift = np.uint64(MASK32), np.uint64(32)
    seed, offset = seeds.astype(np.int64).view(np.uint64), offsets.astype(np.int64).view(np.uint64)
    k0, k1 = seed & low, seed >> shift
    c0, c1 = offset & low, offset >> shift
    c2 = c3 = np.zeros_like(c0)
    for _ in range(10):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (b >> shift) ^ c1 ^ k0, b & low
        c2, c3 = (a >> shift) ^ c3 ^ k1, a & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    x = c0.astype(U32).view(np.int32)
    x = np.where(x < 0, ~x, x)
    return np.maximum(x.astype(np.float32) * np.float32(4.6566127342e-10), RAND_MIN)
