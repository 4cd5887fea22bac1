"""A corpus of responses that drafts are looked up in by a scan: one int32 array, no tree.

    corpus = Corpus()
    corpus.extend(1, [5, 6, 7])                  # sequence 1 grows where it lies
    corpus.speculate([5, 6], k=4, factor=2.0)    # what followed there

With its chains an array takes some 30 bytes a token where a suffix tree takes 300. It grows by writing into it, forgets
by erasing, and closes its gaps when they are half of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollspec.drafting.lookup import DEPTH, OCCURRENCES, SEPARATOR
from rollspec.drafting.lookup_cpu import TOKENS, link, lookup
from rollspec.proposal.base import TokenArray

FIRST = 64
"""Places that a growing sequence gets at first; doubled each time it needs more."""


@dataclass(slots=True)
class Region:
    """Where a sequence lies: `length` tokens from `start` on, in `room` places of which the last stays a separator."""

    start: int
    length: int
    room: int


@dataclass(slots=True)
class Chain:
    """What `speculate` found. `score`: sum of `probs`, the tokens expected to be accepted."""

    token_ids: list[int]
    probs: list[float]
    score: float
    match_len: int


class Corpus:
    """Sequences by id, each in one piece, with separators between. Not thread-safe.

    `limit`: tokens kept; the sequences added first are forgotten beyond it. None: no bound.
    """

    __slots__ = ("_context", "_found", "_heads", "_live", "_probs", "_rows", "_used", "limit", "regions")

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.regions: dict[int, Region] = {}
        self._rows: TokenArray
        self._heads: TokenArray
        self._used = 0  # places given to regions, living or dead
        self._live = 0  # places of living ones
        self._context = np.zeros(DEPTH, np.int32)
        self._found = np.zeros(0, np.int32)
        self._probs = np.zeros(0, np.float32)
        self._compact(0)

    @property
    def tokens(self) -> TokenArray:
        """[n] all that a lookup sees."""
        return self._rows[TOKENS, : self._used]

    def estimate_memory(self) -> int:
        """Bytes."""
        return self._rows.nbytes + self._heads.nbytes

    # ---- text -------------------------------------------------------------------------------------------------------

    def extend_ndarray(self, sequence: int, tokens: TokenArray) -> None:
        """Append `tokens`, [n] int32, to a sequence, which begins with them if it is new."""
        self._append(sequence, tokens, len(tokens))

    def extend(self, sequence: int, tokens: Sequence[int]) -> None:
        """The same for a list."""
        self._append(sequence, tokens, len(tokens))

    def _append(self, sequence: int, tokens: Sequence[int] | TokenArray, n: int) -> None:
        region = self.regions.get(sequence)
        if region is None:
            region = self._place(sequence, n + 1)
        elif region.length + n >= region.room:
            region = self._move(sequence, region, n)
        at = region.start + region.length
        self._rows[TOKENS, at : at + n] = tokens
        link(self._rows, self._heads, region.start, at, at + n)
        region.length += n
        if self.limit is not None:
            while self._live > self.limit and len(self.regions) > 1:
                self.remove(next(iter(self.regions)))

    def _place(self, sequence: int, room: int) -> Region:
        """A region for a new sequence, at the end."""
        self._reserve(room)
        region = self.regions[sequence] = Region(self._used, 0, room)
        self._used += room
        self._live += room
        return region

    def _move(self, sequence: int, region: Region, n: int) -> Region:
        """The sequence with room for `n` more tokens: where it lies if it is the last one, else at the end."""
        room = max(2 * (region.length + n), FIRST)
        if region.start + region.room == self._used:
            more = room - region.room
            self._reserve(more)
            region = self.regions[sequence]
            region.room += more
            self._used += more
            self._live += more
            return region
        said = self._rows[TOKENS, region.start : region.start + region.length].copy()
        self.remove(sequence)
        moved = self._place(sequence, room)
        self._rows[TOKENS, moved.start : moved.start + len(said)] = said
        moved.length = len(said)
        link(self._rows, self._heads, moved.start, moved.start, moved.start + len(said))
        return moved

    def remove(self, sequence: int) -> None:
        """Forget a sequence."""
        region = self.regions.pop(sequence)
        self._rows[TOKENS, region.start : region.start + region.room] = SEPARATOR
        self._live -= region.room
        if self._used > 2 * self._live + FIRST:
            self._compact(self._live)

    def _reserve(self, room: int) -> None:
        """Make place for `room` more at the end."""
        if self._used + room > self._rows.shape[1]:
            self._compact(self._live + room)

    def _compact(self, wanted: int) -> None:
        """Close the gaps that moved and forgotten sequences left, in an array with some more than `wanted` places."""
        size = wanted + max(wanted // 4, FIRST)
        rows = np.full((3, size), SEPARATOR, np.int32)
        heads = np.full((2, 1 << (size - 1).bit_length()), -1, np.int32)
        at = 0
        for region in sorted(self.regions.values(), key=lambda r: r.start):  # the last one stays the last
            old = self._rows[TOKENS, region.start : region.start + region.length]
            rows[TOKENS, at : at + region.length] = old
            region.start = at
            link(rows, heads, at, at, at + region.length)
            at += region.room
        self._rows, self._heads, self._used = rows, heads, at

    # ---- lookup -----------------------------------------------------------------------------------------------------

    def speculate(self, context: Sequence[int], k: int, factor: float, min_prob: float = 0.0) -> Chain:
        """The draft after `context`, of at most `k` tokens; see `lookup`."""
        if len(self._found) < k:
            self._found, self._probs = np.zeros(k, np.int32), np.zeros(k, np.float32)
        n = min(len(context), DEPTH)
        self._context[:n] = context[-n:]
        count, match, score = lookup(
            self._rows,
            self._heads,
            self._used,
            self._context[:n],
            k,
            factor,
            min_prob,
            OCCURRENCES,
            self._found,
            self._probs,
        )
        return Chain(self._found[:count].tolist(), self._probs[:count].tolist(), score, match)
