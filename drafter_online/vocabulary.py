"""Which tokens a draft head drafts: of a large vocabulary those that its target emits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from drafter_online.errors import HeadError

DRAFTED = 8192
"""Tokens that a fresh head drafts of a large vocabulary. Nearly all emitted tokens are among them, and the LM
head of the whole is most of what a pass and a training step cost.
"""

ENOUGH = 4096
"""Tokens that the target must have emitted before they decide which ones are drafted."""

LEAST_GAIN = 0.002
"""Share of the emitted tokens that another choice of tokens must cover more than the present one."""


def drafted(vocabulary: int) -> int | None:
    """Tokens that a head should draft where no number is set; None: all."""
    return DRAFTED if vocabulary >= 2 * DRAFTED else None


def choose(counts: Mapping[int, int], size: int, vocabulary: int) -> tuple[Tensor, Tensor, float | None]:
    """The `size` most frequent tokens: draft-to-target offsets [size], target-to-draft mask [vocabulary], and the share
    of `counts` they cover, None where nothing was counted. Tokens never emitted come after them in the vocabulary's
    order.

    Raises:
        HeadError: a counted token is not in the vocabulary.
    """
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    if counts and not 0 <= min(counts) <= max(counts) < vocabulary:
        raise HeadError(
            f"counts has token {max(counts)}, but the target's vocabulary has {vocabulary}; count the "
            "same target's tokens."
        )
    d2t, t2d = build_vocab_mappings_from_distribution(
        dict.fromkeys(range(size), 1) | {t: n + 1 for t, n in counts.items()}, size, vocabulary
    )
    return d2t, t2d, coverage(counts, t2d)


def misfit(weights: Mapping[str, Tensor], vocabulary: int | None = None) -> str | None:
    """Why a head's `d2t` is no map into the vocabulary (its number of tokens, where that is known): draft token i is
    the target's i + d2t[i], in rising order, and `t2d`, where the head has it, is true there and nowhere else. None
    where it fits, or there is none.
    """
    d2t, t2d = weights.get("d2t"), weights.get("t2d")
    if d2t is None:
        return None
    if t2d is not None and vocabulary is not None and len(t2d) != vocabulary:
        return f"t2d is of {len(t2d)} tokens, and the target's vocabulary has {vocabulary}"
    ids = (torch.arange(len(d2t)) + d2t.detach().to("cpu", torch.int64)).tolist()
    size = vocabulary or (max(ids, default=0) + 1 if t2d is None else len(t2d))
    for i, token in enumerate(ids):
        if not 0 <= token < size:
            return f"d2t makes draft token {i} the target's {token}, which its vocabulary has not"
        if i and token <= ids[i - 1]:
            return f"d2t makes draft token {i} the target's {token}, which is not after that of token {i - 1}"
    if t2d is not None and t2d.detach().cpu().bool().nonzero()[:, 0].tolist() != ids:
        return f"t2d marks other tokens than the {len(ids)} that d2t names"
    return None


def coverage(counts: Mapping[int, int], t2d: Tensor) -> float | None:
    """Share of what was counted that a head with the mask `t2d` [vocabulary] can draft; None where nothing was."""
    total, drafts = sum(counts.values()), t2d.tolist()
    return round(sum(n for t, n in counts.items() if drafts[t]) / total, 6) if total else None


def better(now: Tensor, size: int, counts: Mapping[int, int]) -> tuple[Tensor, Tensor, float, float] | None:
    """A map of `size` tokens that covers more of the counts than the mask `now` [vocabulary] does, with the shares that
    both cover; None where none does, or too little was counted to say.
    """
    if sum(counts.values()) < ENOUGH:
        return None
    d2t, t2d, best = choose(counts, size, len(now))
    had = coverage(counts, now)
    assert best is not None and had is not None
    return (d2t, t2d, best, had) if best - had >= LEAST_GAIN else None
