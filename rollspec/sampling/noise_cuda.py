"""`coupled.choose` for tensors on a GPU: the noise of `noise.gumbel`, bit for bit, in one Triton kernel.

Imported only where tensors are on CUDA and Triton is installed. The words and uniforms are integers and so the same;
logarithms are taken in float64, where two libraries differ in the last bit at most. Checked against numpy in Triton's
interpreter (tests/unit/test_noise.py, where Triton is installed), and on the device itself before it is used
(`coupled.checked`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollspec.sampling.noise import Ints, Words

TILE = 1024
"""Tokens per program; a multiple of the noise's blocks of 128."""


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _kernel(scores, stride, keys, positions, best, token, vocab, tiles, TILE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    v = tile * TILE + tl.arange(0, TILE)  # [TILE] token ids
    zero = (v * 0).to(tl.uint32)
    key = tl.load(keys + row)
    position = zero + tl.load(positions + row).to(tl.uint32)
    block = v // 128
    a0, a1, a2, a3 = tl.philox(key, (block // 2).to(tl.uint32), position, zero, zero)
    odd = block % 2 == 1
    high = tl.where(odd, a2, a0)
    low = tl.where(odd, a3, a1)
    bits = (high.to(tl.uint64) << 20) | (low >> 12).to(tl.uint64)
    time = -tl.log((bits.to(tl.float64) + 0.5) * 2.220446049250313e-16) / 128.0
    b0, b1, b2, b3 = tl.philox(key, (v // 4).to(tl.uint32), position, zero + 1, zero)
    place = v % 4
    word = tl.where(place == 0, b0, tl.where(place == 1, b1, tl.where(place == 2, b2, b3)))
    more = -tl.log((word.to(tl.float64) + 0.5) * 2.3283064365386963e-10)
    more = tl.where((v % 128).to(tl.uint32) == (low & 127), 0.0, more)
    x = tl.load(scores + row * stride + v, mask=v < vocab, other=float("-inf")).to(tl.float64)
    value, at = tl.max(x - tl.log(time + more), 0, return_indices=True)  # the lowest of equals
    tl.store(best + row * tiles + tile, value)
    tl.store(token + row * tiles + tile, tile * TILE + at)


def choose(scores: torch.Tensor, keys: Words, positions: Ints) -> torch.Tensor:
    """argmax(scores + noise) per row.

    Args:
        scores: [n, vocab] float32 on a GPU. keys, positions: [n].

    Returns:
        [n] int64 tokens on the same device.
    """
    scores = scores.contiguous()
    n, vocab = scores.shape
    tiles = triton.cdiv(vocab, TILE)
    device = scores.device
    best = torch.empty((n, tiles), dtype=torch.float64, device=device)
    token = torch.empty((n, tiles), dtype=torch.int64, device=device)
    k = torch.from_numpy(keys.view("int64")).to(device, non_blocking=True)
    p = torch.from_numpy(positions).to(device, non_blocking=True)
    _kernel[(n, tiles)](scores, scores.stride(0), k, p, best, token, vocab, tiles, TILE=TILE)
    return token.gather(1, best.argmax(1, keepdim=True))[:, 0]
