"""Longest-suffix lookup (`rollspec/proposal/lookup_cpu.py`) in plain numpy: the fast one is compared with it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rollspec.proposal.base import TokenArray
from rollspec.proposal.scan import OCCURRENCES, SEPARATOR, Found, empty


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
