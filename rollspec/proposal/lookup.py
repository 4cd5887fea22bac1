"""Longest-suffix lookup: the tokens that follow in the corpus where it matches the end of a request. The definition.

    corpus   ... 7 4 9 5 8 | 2 4 9 5 3 6 | 1 9 5 8 ...        | separator, -1
    context            4 9 5                                  the last `DEPTH` tokens of prompt + response
    match        3 ----^       3 --^         2 --^            equal tokens backwards from each position
    vote               5 -> {8: 1, 3: 1} at length 3,  {8: 2, 3: 1} at length 2

Every position with the context's last token, and with a token after it, is an occurrence. For each match length the
occurrences at least that long vote for the next token, those that have the winner vote for the one after it, and so on:
a token's probability is the product of the shares of the votes up to it. A chain is at most `factor` times as long as
its match. The chain with the largest sum of probabilities is the draft; of equal ones that of the longest match: the
score of SuffixDecoding (arXiv:2411.04975, section 4.2) over an array instead of a tree.

`tests/support/lookup_reference.py` is the definition, in numpy; `lookup_cpu` computes the same, fast.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

SEPARATOR = -1  # between two responses in a corpus, and wherever it holds nothing
NOTHING = -2  # fills a context that is shorter than `DEPTH`, on its left; equal to nothing in a corpus
DEPTH = 16  # longest match

OCCURRENCES = 64
"""Occurrences that vote, at most: the longest matches, of equal ones those furthest back in the corpus, the newest."""


class Found(NamedTuple):
    """Drafts of a batch. Places beyond a row's count are undefined."""

    tokens: npt.NDArray[np.int32]  # [B, K]
    probs: npt.NDArray[np.float32]  # [B, K], cumulative
    counts: npt.NDArray[np.int32]  # [B] tokens drafted
    matches: npt.NDArray[np.int32]  # [B] match length of the chain
    scores: npt.NDArray[np.float32]  # [B] sum of its probabilities


def empty(batch: int, k: int) -> Found:
    """No drafts for `batch` requests, with room for `k` tokens each."""
    return Found(
        np.zeros((batch, k), np.int32),
        np.zeros((batch, k), np.float32),
        np.zeros(batch, np.int32),
        np.zeros(batch, np.int32),
        np.zeros(batch, np.float32),
    )
