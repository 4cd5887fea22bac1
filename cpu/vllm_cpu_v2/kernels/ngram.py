"""`spec_decode/ngram`: the longest suffix of a request that occurred before, and what followed it last."""

from __future__ import annotations

import numpy as np
import torch


def scan(
    token_ids: torch.Tensor,  # [max_num_reqs, max_model_len]
    token_ids_stride: int,
    idx_mapping: torch.Tensor,  # [num_reqs]
    total_len: torch.Tensor,  # [max_num_reqs]
    num_sampled: torch.Tensor,  # [num_reqs]
    scratch: torch.Tensor,  # [max_num_reqs, num_blocks], out: best match per block, 0 for none
    scratch_stride: int,
    max_model_len: int,
    min_n: int,
    max_n: int,
    *_: object,
    **__: object,
) -> None:
    """Find the longest match of n in [min_n, max_n] tokens, the last one of equals.

    A match of n tokens at `position` is the number n * (max_model_len + 1) + position + 1. It goes to the first block
    of the row; the kernel spreads candidates over the blocks and `finalize` takes their maximum.
    """
    out, history, lengths = scratch.numpy(), token_ids.numpy(), total_len.numpy()
    sampled = num_sampled.numpy()
    for i, slot in enumerate(idx_mapping.tolist()):
        out[i] = 0
        length = int(lengths[slot])
        if sampled[i] <= 0 or length < min_n:
            continue
        row = history[slot, :length]
        # Positions where the last n tokens occurred before, n growing: a longer match ends where a shorter one does.
        ends = np.flatnonzero(row[:-1] == row[-1])
        best = 0
        for n in range(1, min(max_n, length - 1) + 1):
            if n > 1:
                ends = ends[ends >= n - 1]
                ends = ends[row[ends - (n - 1)] == row[length - n]]
            if not ends.size:
                break
            if n >= min_n:
                best = n * (max_model_len + 1) + int(ends[-1]) - (n - 1) + 1
        out[i, 0] = best


def finalize(
    token_ids: torch.Tensor,  # [max_num_reqs, max_model_len]
    token_ids_stride: int,
    idx_mapping: torch.Tensor,  # [num_reqs]
    total_len: torch.Tensor,  # [max_num_reqs]
    num_sampled: torch.Tensor,  # [num_reqs]
    last_sampled: torch.Tensor,  # [max_num_reqs]
    scratch: torch.Tensor,  # [max_num_reqs, num_blocks]
    scratch_stride: int,
    drafts: torch.Tensor,  # [max_num_reqs, K], out
    max_model_len: int,
    num_blocks: int,
    num_drafts: int,
    *_: object,
    **__: object,
) -> None:
    """Copy the tokens behind the match; the last sampled token fills what is left."""
    idx = idx_mapping.numpy()
    n = len(idx)
    score = scratch.numpy()[:n, :num_blocks].max(-1) - 1
    found = (score >= 0) & (num_sampled.numpy()[:n] > 0)
    length, position = np.divmod(np.maximum(score, 0), max_model_len + 1)
    at = (length + position)[:, None] + np.arange(num_drafts)
    valid = (at < total_len.numpy()[idx][:, None]) & found[:, None]
    behind = token_ids.numpy()[idx[:, None], np.minimum(at, max_model_len - 1)]
    drafts.numpy()[:n] = np.where(valid, behind, last_sampled.numpy()[idx][:, None])
