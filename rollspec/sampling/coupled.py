"""Coupled sampling: every token is argmax(logits / T + Gumbel(key, position, token)), whether or not it was drafted.

A draft token is accepted while it equals that argmax, and the first that differs is replaced by it. So drafts decide
how many tokens a step yields and never which: any selection of drafts is exact, and the text is the same with any
drafter, any K and none. Pure: torch and numpy, no engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from rollspec.sampling.noise import BLOCK, Ints, Words, block_minima, gumbel, later

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("rollspec")

Kernel: TypeAlias = "Callable[[torch.Tensor, Words, Ints], torch.Tensor]"
"""`noise_cuda.choose`, or what has its signature."""

CHUNK = 1 << 14
"""Blocks whose noise is drawn together: what stays in a core's cache."""

SMALL, FEW = 1, 64
"""Blocks of a vocabulary, and of all rows, up to which all noise is drawn: there it is cheaper than choosing blocks."""

WHOLE = 1 << 8
"""Blocks whose noise is drawn whole together."""


def sample(logits: torch.Tensor, keys: Words, positions: Ints, kernel: Kernel | None = None) -> torch.Tensor:
    """One token per row: an exact draw from softmax(logits), the same for the same (logits, key, position).

    Args:
        logits: [n, vocab] float32, temperature and masks applied; -inf tokens are never drawn. They are only read.
        keys: [n] noise keys. positions: [n] index of the drawn token in the whole sequence.
        kernel: of `kernel_for`; None draws on the CPU.

    Returns:
        [n] int64 on the device of `logits`.
    """
    import torch

    if kernel is not None:
        return kernel(logits, keys, positions)
    return torch.from_numpy(choose(logits.cpu().numpy(), keys, positions)).to(logits.device)


def kernel_for(device: torch.device, vocab: int) -> Kernel | None:
    """The kernel for tensors on this device, tried there; None where there is none, or none that can be relied on."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None

    def load() -> Kernel:
        from rollspec.sampling import noise_cuda

        return noise_cuda.choose

    return checked(load, device, vocab)


def checked(load: Callable[[], Kernel], device: torch.device, vocab: int) -> Kernel | None:
    """What `load` gives if it draws the tokens of `choose` on this device; otherwise None, and a warning says why.

    Args:
        load: may raise. vocab: as in use, because kernels are compiled for such numbers.
    """
    import torch

    rng = np.random.default_rng(0)
    scores = (3.0 * rng.standard_normal((4, vocab))).astype(np.float32)
    scores[1, : vocab // 2] = -np.inf
    keys, positions = rng.integers(0, 1 << 64, 4, dtype=np.uint64), rng.integers(0, 1 << 31, 4)
    try:
        kernel = load()
        tokens = kernel(torch.from_numpy(scores).to(device), keys, positions).tolist()
        if tokens == choose(scores, keys, positions).tolist():
            return kernel
        reason = "it draws other tokens"
    except Exception as e:
        reason = f"{type(e).__name__}: {e}"
    logger.warning(
        "rollspec: the kernel of coupled sampling is not used on %s (%s); tokens are the same, but drawn on the CPU, "
        "which is slower.",
        device,
        reason,
    )
    return None


def choose(scores: npt.NDArray[np.float32], keys: Words, positions: Ints) -> Ints:
    """argmax(scores + noise.gumbel(...)) per row, computing noise only for blocks that can win.

    Args:
        scores: [n, vocab], no NaN. keys, positions: [n].

    Returns:
        [n] tokens, the lowest of equals; 0 where a row has nothing but -inf.
    """
    n, vocab = scores.shape
    blocks = -(-vocab // BLOCK)
    if blocks <= SMALL or n * blocks <= FEW:
        out = np.empty(n, dtype=np.int64)
        rows = max(1, WHOLE // blocks)
        for at in range(0, n, rows):
            part = slice(at, at + rows)
            (scores[part] + gumbel(keys[part], positions[part], vocab)).argmax(1, out=out[part])
        return out
    if missing := -vocab % BLOCK:
        scores = np.pad(scores, ((0, 0), (0, missing)), constant_values=-np.inf)
    scores = scores.reshape(n, blocks, BLOCK)
    out = np.zeros(n, dtype=np.int64)
    rows = max(1, CHUNK // blocks)
    for at in range(0, n, rows):
        part = slice(at, at + rows)
        _choose(scores[part], keys[part], positions[part], out[part])
    return out


def _choose(x: npt.NDArray[np.float32], keys: Words, positions: Ints, out: Ints) -> None:
    """`choose` for [n, blocks, 128] scores, into `out`."""
    n, blocks, _ = x.shape
    top = x.max(-1)
    rows, likely = np.arange(n), top.argmax(1)
    place = x[rows, likely].argmax(1)
    times, holder, more = block_minima(keys, positions, blocks, likely * BLOCK + place)
    bound = -np.log(times)  # of the noise in a block; its holder has exactly this
    held = np.take_along_axis(x, holder[..., None], -1)[..., 0]
    # What the most likely token reaches is a far better bound than the holders', which are any tokens.
    more[place == holder[rows, likely]] = 0.0
    best = np.maximum((held + bound).max(1), top[rows, likely] - np.log(times[rows, likely] + more))
    row, block = np.divmod(np.flatnonzero(top + bound >= best[:, None]), blocks)
    near = x[row, block]  # [candidate blocks, 128]
    which, place = np.divmod(np.flatnonzero(near + bound[row, block][:, None] >= best[row][:, None]), BLOCK)
    if not len(which):
        return
    row, block = row[which], block[which]
    more = later(keys[row], positions[row], block * BLOCK + place)
    more[place == holder[row, block]] = 0.0
    value = near[which, place] - np.log(times[row, block] + more)  # [candidate tokens], by row and token
    new = np.concatenate([[True], row[1:] != row[:-1]])
    winner = np.maximum.reduceat(value, np.flatnonzero(new))
    wins = np.flatnonzero(value == winner[np.cumsum(new) - 1])[::-1]  # the lowest of equals is written last
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
