"""Attention of the training-time-test forward, one document at a time.

At its i-th step a column attends to the emitted tokens of its document before it and, of each later step, to its own
column only. As one mask over L columns that is a matrix [L, (i + 1) L], nearly empty and most of a micro-step. Here
each document's own square is computed, and beside it one score per column and later step:

    step 2, documents a (3 columns) and b (2)      what is computed
    a: # . . | # . . | # . .                        3 x 3, and 2 per column
       # # . | . # . | . # .
       # # # | . . # | . . #
    b: likewise                                     2 x 2, and 2 per column

A test compares the numbers with `speculators`' masks; layers with a sliding window keep those masks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

NAME = "drafter_online_documents"
_now = threading.local()  # spans of the batch that this thread computes


def use(head: Any) -> None:
    """Have a `speculators` EAGLE-3 head attend by documents, where none of its layers has a sliding window."""
    from speculators.models.attention import ALL_ATTENTION_FUNCTIONS

    if head.uses_sliding_window_attn:
        return
    ALL_ATTENTION_FUNCTIONS.register(NAME, by_document)
    head.config.transformer_layer_config._attn_implementation = NAME
    for layer in head.layers:
        layer.self_attn.config._attn_implementation = NAME
    head._attn_impl = NAME

    def no_mask(*_: Any, Q_LEN: int, device: Any = None, **__: Any) -> Tensor:  # noqa: N803 - theirs
        return torch.ones(1, 1, Q_LEN, 0, dtype=torch.bool, device=device)

    head._create_mask_fn = no_mask


@contextmanager
def documents(ids: Tensor) -> Iterator[None]:
    """The batch that is computed within: document ids [1, L]."""
    _now.spans = spans(ids)
    try:
        yield
    finally:
        _now.spans = None


def spans(ids: Tensor) -> list[tuple[int, int]]:
    """(start, stop) of each run of equal ids."""
    _, lengths = torch.unique_consecutive(ids[0], return_counts=True)
    ends = lengths.cumsum(0).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def by_document(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None, **_: Any
) -> tuple[Tensor, None]:
    """An attention function of `transformers`' interface: query [1, heads, L, D]; key and value [1, key heads, (i + 1)
    L, D], those of the steps so far, one after the other. Returns [1, L, heads, D], and no weights.
    """
    length = query.shape[2]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    group = query.shape[1] // key.shape[1]
    if group > 1:
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    (first_k, *later_k), (first_v, *later_v) = torch.split(key, length, 2), torch.split(value, length, 2)
    # Of each later step, a column's own score. [1, heads, L, i]
    own = torch.stack([(query * k).sum(-1) for k in later_k], -1) * scale if later_k else None
    out = []
    for a, b in _now.spans:
        q, k, v = (t[:, :, a:b] for t in (query, first_k, first_v))
        if own is None:
            out.append(scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale))
            continue
        n = b - a
        scores = q @ k.transpose(-1, -2) * scale  # [1, heads, n, n]
        ahead = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
        scores = torch.cat([scores.masked_fill(ahead, float("-inf")), own[:, :, a:b]], -1)
        weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
        weights, *each = torch.split(weights, [n, *[1] * len(later_v)], -1)
        part = weights @ v
        for weight, later in zip(each, later_v, strict=True):
            part = part + weight * later[:, :, a:b]
        out.append(part)
    return torch.cat(out, 2).transpose(1, 2).contiguous(), None
