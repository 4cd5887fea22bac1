"""Longest-suffix lookup: the tokens that follow in the corpus where it matches the end of a request. The definition.

    corpus   ... 7 4 9 5 8 | 2 4 9 5 3 6 | 1 9 5 8 ...        | separator, -1
    context            4 9 5                                  the last `DEPTH` tokens of prompt + response
    match        3 ----^       3 --^         2 --^            equal tokens backwards from each position
    vote               5 -> {8: 1, 3: 1} at length 3,  {8: 2, 3: 1} at length 2

Every position in a request's slice with the context's last token, and with a token after it, is an occurrence; its
match length is the number of equal tokens backwards. For each match length the occurrences at least that long vote for
the next token, those that have the winner vote for the one after it, and so on: a token's probability is the product of
the shares of the votes up to it. A chain is at most `factor` times as long as its match. The chain with the largest sum
of probabilities, the number of tokens expected to be accepted, is the draft; of equal ones that of the longest match.
This is SuffixDecoding's score (arXiv:2411.04975, section 4.2) over an array instead of a tree.

`reference` is the definition, in numpy; `lookup_cpu` computes the same, fast; on a device `benchmarks/gpu` does.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rollspec.proposal.base import TokenArray

SEPARATOR = -1
"""Between two responses in a corpus, and wherever it holds nothing."""

NOTHING = -2
"""Fills a context that is shorter than `DEPTH`, on its left; equal to nothing in a corpus."""

DEPTH = 16
"""Longest match."""

OCCURRENCES = 64
"""Occurrences that vote, at most: the longest matches, of equal ones those furthest back in the corpus, the newest."""


class Found(NamedTuple):
    """Drafts of a batch. Rows beyond a row's count are undefined.

    `tokens` int32 [B, K]. `probs` float32 [B, K]: cumulative. `counts` int32 [B]: tokens drafted. `matches` int32 [B]:
    match length of the chain. `scores` float32 [B]: sum of its probabilities.
    """

    tokens: npt.NDArray[np.int32]
    probs: npt.NDArray[np.float32]
    counts: npt.NDArray[np.int32]
    matches: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float32]


def empty(batch: int, k: int) -> Found:
    """No drafts for `batch` requests, with room for `k` tokens each."""
    return Found(
        np.zeros((batch, k), np.int32),
        np.zeros((batch, k), np.float32),
        np.zeros(batch, np.int32),
        np.zeros(batch, np.int32),
        np.zeros(batch, np.float32),
    )


def reference(
    corpus: TokenArray,
    starts: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    contexts: TokenArray,
    rooms: npt.NDArray[np.int32],
    factor: float,
    min_prob: float,
) -> Found:
    """Draft for each request from its slice of the corpus.

    Args:
        corpus: [N] responses with a `SEPARATOR` after each.
        starts: [B] where a request's slice begins. ends: [B] where it ends.
        contexts: [B, DEPTH] last tokens of each request, right-aligned, filled with `NOTHING`.
        rooms: [B] most tokens of a draft.
        factor: most tokens of a draft per token matched.
        min_prob: a chain ends before the token that takes its cumulative probability below this.
    """
    found = empty(len(contexts), int(rooms.max(initial=0)))
    for b, context in enumerate(contexts):
        text = corpus[starts[b] : ends[b]]
        lengths = _match_lengths(text, context)  # [n]
        order = np.lexsort((-np.arange(len(text)), -lengths))[:OCCURRENCES]
        order = order[lengths[order] > 0]
        for length in sorted(set(lengths[order].tolist()), reverse=True):
            most = min(int(rooms[b]), int(length * factor + 1e-6))
            tokens, probs = _follow(text, order[lengths[order] >= length], most, min_prob)
            score = np.float32(sum(probs))
            if score > found.scores[b]:
                n = len(tokens)
                found.tokens[b, :n], found.probs[b, :n] = tokens, probs
                found.counts[b], found.matches[b], found.scores[b] = n, length, score
    return found


def _match_lengths(text: TokenArray, context: TokenArray) -> npt.NDArray[np.int64]:
    """[n] tokens that end with each place of `text` and are the context's last ones; 0 where nothing follows it."""
    n = len(text)
    lengths = np.zeros(n, np.int64)
    alive = np.ones(n, bool)
    for back, token in enumerate(context[::-1]):
        shifted = np.concatenate([np.full(min(back, n), SEPARATOR, np.int32), text[: max(0, n - back)]])
        alive &= shifted == token
        lengths += alive
    followed = np.concatenate([text[1:] != SEPARATOR, [False]])[:n]
    lengths[~followed] = 0
    return lengths


def _follow(
    text: TokenArray, positions: npt.NDArray[np.int64], most: int, min_prob: float
) -> tuple[list[int], list[np.float32]]:
    """The chain that follows most of `positions`, and its cumulative shares. Ties go to the first in `positions`."""
    tokens: list[int] = []
    probs: list[np.float32] = []
    prob = np.float32(1.0)
    while len(tokens) < most:
        after = positions + len(tokens) + 1
        after = after[after < len(text)]
        votes = [t for t in text[after].tolist() if t != SEPARATOR]
        if not votes:
            break
        winner = max(dict.fromkeys(votes), key=votes.count)
        prob = np.float32(prob * np.float32(np.float32(votes.count(winner)) / np.float32(len(votes))))
        if prob < np.float32(min_prob):
            break
        tokens.append(winner)
        probs.append(prob)
        positions = after[text[after] == winner] - len(tokens)
    return tokens, probs
