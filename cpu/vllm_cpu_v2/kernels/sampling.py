"""`sample/gumbel` and `sample/min_p`: temperature, min-p, and the Gumbel-max draw that decides the sampled token."""

from __future__ import annotations

import numpy as np
import torch

from ..memory import arange
from ..noise import DRAFT_SALT, gumbel, gumbel_from_hash, hash32

# Rows are drawn in groups whose noise fits in a core's second-level cache.
CHUNK_VALUES = 1 << 17

RARE = 1 << 25
"""A hash from here on has noise of at most -log(-log(1 - 1/128)), 4.85; no noise is below -2.82."""
REACH = np.float32(8.0)
"""More than 4.85 + 2.82: a value so far below the largest wins by rare noise alone."""


def temperature(
    logits: torch.Tensor,  # [num_logits, vocab_size], in and out
    logits_stride: int,
    expanded_idx_mapping: torch.Tensor,  # [num_logits]
    temperatures: torch.Tensor,  # [max_num_reqs]
    *_: object,
    **__: object,
) -> None:
    """Divide each row by its temperature; 0 (greedy) and 1 leave the row alone."""
    t = temperatures.numpy()[expanded_idx_mapping.numpy()]
    logits.div_(torch.from_numpy(np.where(t == 0, np.float32(1), t))[:, None])


def min_p(
    logits: torch.Tensor,  # [num_logits, vocab_size], in and out
    logits_stride: int,
    expanded_idx_mapping: torch.Tensor,  # [num_logits]
    min_ps: torch.Tensor,  # [max_num_reqs]
    *_: object,
    **__: object,
) -> None:
    """Mask tokens whose probability is below min_p times the largest one."""
    p = min_ps.numpy()[expanded_idx_mapping.numpy()]
    with np.errstate(divide="ignore"):  # min_p 0: a threshold of -inf masks nothing
        threshold = logits.amax(-1, keepdim=True).float() + torch.from_numpy(np.log(p))[:, None]
    logits.masked_fill_(logits < threshold, float("-inf"))


def gumbel_sample(
    local_argmax: torch.Tensor,  # [num_logits, num_blocks], out
    local_argmax_stride: int,
    local_max: torch.Tensor,  # [num_logits, num_blocks], out
    local_max_stride: int,
    logits_cache: torch.Tensor | None,  # [max_num_reqs, columns, vocab_size], out
    logits_cache_stride_0: int,
    logits_cache_stride_1: int,
    logits_cache_col: torch.Tensor | None,  # scalar, or [num_logits] with PER_TOKEN_COL
    logits_cache_source: torch.Tensor | None,  # [num_logits, vocab_size]
    logits_cache_source_stride: int,
    logits: torch.Tensor,  # [num_logits, vocab_size]
    logits_stride: int,
    expanded_idx_mapping: torch.Tensor,  # [num_logits], negative: padding
    seeds: torch.Tensor,  # [max_num_reqs]
    pos: torch.Tensor,  # [num_logits]
    temperatures: torch.Tensor,  # [max_num_reqs]
    vocab_size: int,
    IS_DRAFTING: bool,  # noqa: N803
    APPLY_TEMPERATURE: bool,  # noqa: N803
    USE_FP64: bool,  # noqa: N803
    PER_TOKEN_COL: bool,  # noqa: N803
    **_: object,
) -> None:
    """Draw one token per row: argmax of logits plus noise, plain argmax at temperature 0.

    The kernel leaves one candidate per block and its caller picks the best block. Here the drawn token is the
    candidate of every block, so whichever block the caller picks is right.
    """
    slots = expanded_idx_mapping.numpy()
    if logits_cache is not None:
        rows = np.flatnonzero(slots >= 0)
        column = logits_cache_col.numpy()
        columns = column[rows] if PER_TOKEN_COL else np.broadcast_to(column.reshape(-1)[:1], rows.shape)
        logits_cache[torch.from_numpy(slots[rows]), torch.from_numpy(columns.astype(np.int64)), :vocab_size] = (
            logits_cache_source[torch.from_numpy(rows)]
        )
    t = temperatures.numpy()[slots]
    if slots.min(initial=0) < 0:
        t = np.where(slots >= 0, t, np.float32(0))
    tokens = draw(
        logits,
        t,
        seeds.numpy()[slots],
        pos.numpy() + DRAFT_SALT if IS_DRAFTING else pos.numpy(),
        APPLY_TEMPERATURE,
        USE_FP64,
    )
    local_argmax.copy_(torch.from_numpy(tokens)[:, None])
    local_max.zero_()


def draw(
    logits: torch.Tensor,  # [num_logits, vocab_size]
    temperatures: np.ndarray,  # [rows]
    seeds: np.ndarray,  # [rows]
    positions: np.ndarray,  # [rows]
    apply_temperature: bool,
    fp64: bool,
    rows: np.ndarray | None = None,  # of logits; all of them by default
    without: np.ndarray | None = None,  # [rows] a token that cannot be drawn, -1: none
) -> np.ndarray:
    """The drawn token of every row, int64 [rows]; the first of equal maxima, as in the kernel."""
    values = logits.float().numpy()
    rows = arange(len(values)) if rows is None else rows
    tokens = np.empty(len(rows), dtype=np.int64)
    greedy, random = np.flatnonzero(temperatures == 0), np.flatnonzero(temperatures)
    tokens[greedy] = [values[row].argmax() for row in rows[greedy].tolist()]
    vocab_size = values.shape[1]
    step = max(1, CHUNK_VALUES // vocab_size)
    for begin in range(0, len(random), step):
        at = random[begin : begin + step]
        chosen = values[rows[at]]
        if without is not None:
            take_out(chosen, without[at])
        if apply_temperature:
            chosen /= temperatures[at][:, None]
        if fp64:
            tokens[at] = (gumbel(seeds[at], positions[at], vocab_size, fp64) + chosen).argmax(-1)
        else:
            tokens[at] = _noisiest(chosen, hash32(seeds[at], positions[at], vocab_size))
    return tokens


def take_out(residual: np.ndarray, tokens: np.ndarray) -> None:
    """What is left of the target beside a one-hot draft that was rejected: all but its token; -1: none was."""
    cut = np.flatnonzero(tokens >= 0)
    residual[cut, tokens[cut]] = float("-inf")


def _noisiest(values: np.ndarray, hashes: np.ndarray) -> list[int]:
    """Each row's argmax of values plus noise; noise is computed of the few tokens that can win."""
    can_win = ~(values < (values.max(-1) - REACH)[:, None])  # so that it has all tokens of a row with NaN
    can_win |= hashes < RARE
    tokens = []
    for row, hashed, wins in zip(values, hashes, can_win, strict=True):
        at = np.flatnonzero(wins)
        tokens.append(int(at[(gumbel_from_hash(hashed[at]) + row[at]).argmax()]))
    return tokens
