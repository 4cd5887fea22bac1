"""A corpus of responses that drafts are looked up in by a scan: one int32 array, no tree.

    corpus = Corpus()
    corpus.extend(1, [5, 6, 7])                  # append to sequence 1 in place
    corpus.speculate([5, 6], k=4, factor=2.0)    # what followed there

With its chains an array takes some 30 bytes a token where a suffix tree takes 300. Tokens are written in place, dropped
sequences are erased, and the array is compacted when half of it is gaps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import numpy.typing as npt

from rollspec.proposal import lookup_cpu
from rollspec.proposal.base import TokenArray
from rollspec.proposal.lookup import DEPTH, NOTHING, OCCURRENCES, SEPARATOR, Found, empty
from rollspec.proposal.lookup_cpu import HEADER, TOKENS, link

FIRST = 64
"""Positions that a growing sequence gets at first; doubled each time it needs more."""


@dataclass(slots=True)
class Region:
    """Where a sequence is stored: `length` tokens from `start` on, in `room` positions; the last is a separator."""

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

    __slots__ = ("_header", "_heads", "_live", "_rows", "address", "limit", "regions")

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.regions: dict[int, Region] = {}
        self._rows: TokenArray
        self._heads: TokenArray
        self._header = np.zeros(HEADER, np.int64)
        self.address = self._header.ctypes.data
        self._live = 0  # positions of living regions
        self._compact(0)

    @property
    def _used(self) -> int:
        """Positions given to regions, living or dead."""
        return int(self._header[-1])

    @_used.setter
    def _used(self, positions: int) -> None:
        self._header[-1] = positions

    @property
    def tokens(self) -> TokenArray:
        """[n] all that a lookup sees."""
        return self._rows[TOKENS, : self._used]

    def estimate_memory(self) -> int:
        """Bytes."""
        return self._rows.nbytes + self._heads.nbytes

    # ---- text -------------------------------------------------------------------------------------------------------

    def extend(self, sequence: int, tokens: Sequence[int] | TokenArray) -> None:
        """Append `tokens` to a sequence, which begins with them if it is new."""
        extend([(self, sequence, tokens)])

    def make_room(self, sequence: int, n: int) -> Region:
        """The region of a sequence, with room for `n` more tokens; what lies there may move."""
        region = self.regions.get(sequence)
        if region is None:
            region = self._place(sequence, n + 1)
        elif region.length + n >= region.room:
            region = self._move(sequence, region, n)
        if self.limit is not None:
            while self._live > self.limit and len(self.regions) > 1:
                self.remove(next(s for s in self.regions if s != sequence))
        return region

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
        tokens = self._rows[TOKENS, region.start : region.start + region.length].copy()
        self.remove(sequence)
        moved = self._place(sequence, room)
        self._rows[TOKENS, moved.start : moved.start + len(tokens)] = tokens
        moved.length = len(tokens)
        link(self._rows, self._heads, moved.start, moved.start, moved.start + len(tokens))
        return moved

    def remove(self, sequence: int) -> None:
        """Forget a sequence."""
        region = self.regions.pop(sequence)
        self._rows[TOKENS, region.start : region.start + region.room] = SEPARATOR
        self._live -= region.room
        if self._used > 2 * self._live + FIRST:
            self._compact(self._live)

    def _reserve(self, room: int) -> None:
        """Reserve `room` more positions at the end."""
        if self._used + room > self._rows.shape[1]:
            self._compact(self._live + room)

    def _compact(self, wanted: int) -> None:
        """Close the gaps that moved and dropped sequences left; the array gets some more than `wanted` positions."""
        size = wanted + max(wanted // 4, FIRST)
        rows = np.full((3, size), SEPARATOR, np.int32)
        heads = np.full((2, 1 << (size - 1).bit_length()), -1, np.int32)
        at = 0
        for region in sorted(self.regions.values(), key=lambda r: r.start):  # keeps the last one last
            old = self._rows[TOKENS, region.start : region.start + region.length]
            rows[TOKENS, at : at + region.length] = old
            region.start = at
            link(rows, heads, at, at, at + region.length)
            at += region.room
        self._rows, self._heads = rows, heads
        self._header[:] = rows.ctypes.data, size, heads.ctypes.data, heads.shape[1], at

    # ---- lookup -----------------------------------------------------------------------------------------------------

    def speculate(self, context: Sequence[int], k: int, factor: float, min_prob: float = 0.0) -> Chain:
        """The draft after `context`, of at most `k` tokens; see `look_up`."""
        given = [*[NOTHING] * DEPTH, *context][-DEPTH:]
        found, _ = look_up([self], None, 0, [given], [k], factor, min_prob)
        n = int(found.counts[0])
        return Chain(
            found.tokens[0, :n].tolist(), found.probs[0, :n].tolist(), float(found.scores[0]), int(found.matches[0])
        )


def extend(rows: Iterable[tuple[Corpus, int, Sequence[int] | TokenArray]]) -> None:
    """Append tokens to sequences of corpora, in this order, in one call for all that find room where they lie."""
    corpora: list[int] = []
    starts: list[int] = []
    positions: list[int] = []
    texts: list[Sequence[int] | TokenArray] = []
    for corpus, sequence, tokens in rows:
        region = corpus.regions.get(sequence)
        if region is None or region.length + len(tokens) >= region.room:
            _write(corpora, starts, positions, texts)  # what is moved is linked anew, after what came before
            corpora, starts, positions, texts = [], [], [], []
            region = corpus.make_room(sequence, len(tokens))
        corpora.append(corpus.address)
        starts.append(region.start)
        positions.append(region.start + region.length)
        texts.append(tokens)
        region.length += len(tokens)
    _write(corpora, starts, positions, texts)


def _write(
    corpora: list[int], starts: list[int], positions: list[int], texts: list[Sequence[int] | TokenArray]
) -> None:
    """Write each text into its corpus, from its place on, in the sequence that begins at its start."""
    if not texts:
        return
    ends = np.array(list(accumulate(map(len, texts))))
    tokens = texts[0] if len(texts) == 1 else np.fromiter(chain.from_iterable(texts), np.int32, ends[-1])
    lookup_cpu.extend(
        np.array(corpora), np.array(starts), np.array(positions), ends, np.ascontiguousarray(tokens, np.int32)
    )


def look_up(
    corpora: Sequence[Corpus],
    fallback: Corpus | None,
    weak: int,
    contexts: Sequence[Sequence[int]],
    rooms: Sequence[int],
    factor: float,
    min_prob: float,
) -> tuple[Found, npt.NDArray[np.bool_]]:
    """The drafts of a batch, as `lookup` defines them, each from its own corpus.

    Args:
        corpora: one per request.
        fallback: where matches below `weak` tokens are compared with what it says. None: nowhere.
        contexts: last `DEPTH` tokens of each request, filled with `NOTHING` on the left.
        rooms: most tokens of each draft.
        factor: most tokens of a draft per token matched.
        min_prob: a chain ends before the token that takes its cumulative probability below this.

    Returns:
        The drafts, and which of them are the fallback's. Shape [B].
    """
    batch = len(corpora)
    found, wider = empty(batch, max(rooms, default=0)), np.zeros(batch, np.bool_)
    addresses = np.array([c.address for c in corpora], np.int64)
    lookup_cpu.lookup(
        addresses, fallback.address if fallback is not None else 0, weak,
        np.array(contexts, np.int32).reshape(batch, DEPTH), np.array(rooms, np.int32),
        factor, min_prob, OCCURRENCES, found, wider,
    )  # fmt: skip
    return found, wider
