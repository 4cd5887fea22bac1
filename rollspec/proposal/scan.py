"""A corpus of responses that drafts are looked up in by a scan: one int32 array, no tree.

    corpus = Corpus()
    corpus.extend(1, [5, 6, 7])                              # append to sequence 1 in place
    found, _ = look_up([corpus], None, [context], [4])       # what followed there

An array takes some 30 bytes a token where a suffix tree takes 300. It is compacted when half of it is gaps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rollspec.proposal import lookup_cpu
from rollspec.proposal.base import DEPTH, TokenArray
from rollspec.proposal.lookup_cpu import HEADER, TOKENS, link
from rollspec.proposal.ngrams import MIN_PROB

SEPARATOR = -1  # between two responses in a corpus, and wherever it holds nothing

OCCURRENCES = 64
"""Occurrences that vote, at most: the longest matches, of equal ones those furthest back in the corpus, the newest."""

SPEC_FACTOR = 2.0
"""A draft is at most this many times as long as its match: a short match says little about what follows."""

WEAK_MATCH = 8  # below this match length the group's draft is compared with the global corpus's
FIRST = 64  # positions that a growing sequence gets at first; doubled each time it needs more


@dataclass(slots=True)
class Region:
    """Where a sequence is stored: `length` tokens from `start` on, in `room` positions; the last is a separator."""

    start: int
    length: int
    room: int


class Corpus:
    """Sequences by id, each in one piece, with separators between. Not thread-safe."""

    __slots__ = ("_header", "_heads", "_rows", "address", "live", "regions")

    def __init__(self) -> None:
        self.regions: dict[int, Region] = {}
        self._rows: TokenArray
        self._heads: TokenArray
        self._header = np.zeros(HEADER, np.int64)
        self.address = self._header.ctypes.data
        self.live = 0  # positions of living regions
        self._compact(0)

    @property
    def _used(self) -> int:
        """Positions given to regions, living or dead."""
        return int(self._header[-1])

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
        """A region for a sequence that is new, or has no room for `n` more tokens: where it lies if it is the last one,
        else at the end.
        """
        region = self.regions.get(sequence)
        if region is None:
            return self._place(sequence, n + 1)
        room = max(2 * (region.length + n), FIRST)
        if region.start + region.room == self._used:
            more = room - region.room
            self._reserve(more)
            region.room += more
            self._header[-1] += more
            self.live += more
            return region
        tokens = self._rows[TOKENS, region.start : region.start + region.length].copy()
        self.remove(sequence)
        moved = self._place(sequence, room)
        self._rows[TOKENS, moved.start : moved.start + len(tokens)] = tokens
        moved.length = len(tokens)
        link(self._rows, self._heads, moved.start, moved.start, moved.start + len(tokens))
        return moved

    def _place(self, sequence: int, room: int) -> Region:
        self._reserve(room)
        region = self.regions[sequence] = Region(self._used, 0, room)
        self._header[-1] += room
        self.live += room
        return region

    def remove(self, sequence: int) -> None:
        """Forget a sequence."""
        region = self.regions.pop(sequence)
        self._rows[TOKENS, region.start : region.start + region.room] = SEPARATOR
        self.live -= region.room
        if self._used > 2 * self.live + FIRST:
            self._compact(self.live)

    def _reserve(self, room: int) -> None:
        if self._used + room > self._rows.shape[1]:
            self._compact(self.live + room)

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


def extend(rows: Iterable[tuple[Corpus, int, Sequence[int] | TokenArray]]) -> None:
    """Append tokens to sequences of corpora, in this order, in one call for all that find room where they lie."""
    batch: list[tuple[int, int, int, Sequence[int] | TokenArray]] = []
    for corpus, sequence, tokens in rows:
        region = corpus.regions.get(sequence)
        if region is None or region.length + len(tokens) >= region.room:
            _write(batch)  # what is moved is linked anew, after what came before
            batch = []
            region = corpus.make_room(sequence, len(tokens))
        batch.append((corpus.address, region.start, region.start + region.length, tokens))
        region.length += len(tokens)
    _write(batch)


def _write(batch: Sequence[tuple[int, int, int, Sequence[int] | TokenArray]]) -> None:
    """Write texts: the address of each one's corpus, the start of its sequence, its own place, and its tokens."""
    if not batch:
        return
    corpora, starts, positions, texts = zip(*batch, strict=True)
    ends = np.array(list(accumulate(map(len, texts))))
    tokens = texts[0] if len(texts) == 1 else np.fromiter(chain.from_iterable(texts), np.int32, ends[-1])
    lookup_cpu.extend(
        np.array(corpora), np.array(starts), np.array(positions), ends, np.ascontiguousarray(tokens, np.int32)
    )


class Found(NamedTuple):
    """Drafts of a batch. Entries beyond a row's count are undefined."""

    tokens: npt.NDArray[np.int32]  # [B, K]
    probs: npt.NDArray[np.float32]  # [B, K], cumulative
    counts: npt.NDArray[np.int32]  # [B] tokens drafted
    matches: npt.NDArray[np.int32]  # [B] match length of the chain
    scores: npt.NDArray[np.float32]  # [B] sum of its probabilities


def empty(batch: int, k: int) -> Found:
    """No drafts for `batch` requests, with room for `k` tokens each."""
    tokens, probs = np.zeros((batch, k), np.int32), np.zeros((batch, k), np.float32)
    return Found(tokens, probs, np.zeros(batch, np.int32), np.zeros(batch, np.int32), np.zeros(batch, np.float32))


def look_up(
    corpora: Sequence[Corpus],
    fallback: Corpus | None,
    contexts: Sequence[Sequence[int]],
    rooms: Sequence[int],
) -> tuple[Found, npt.NDArray[np.bool_]]:
    """The drafts of a batch, as `lookup_cpu` defines them, each from its own corpus; and which are the fallback's, [B].

    `fallback`: where matches below `WEAK_MATCH` tokens are compared with what it says. `contexts`: last `DEPTH` tokens
    of each request, filled with `NOTHING` on the left. `rooms`: most tokens of each draft.
    """
    batch = len(corpora)
    found, wider = empty(batch, max(rooms, default=0)), np.zeros(batch, np.bool_)
    addresses = np.array([c.address for c in corpora], np.int64)
    lookup_cpu.lookup(
        addresses, fallback.address if fallback is not None else 0, WEAK_MATCH,
        np.array(contexts, np.int32).reshape(batch, DEPTH), np.array(rooms, np.int32),
        SPEC_FACTOR, MIN_PROB, OCCURRENCES, found, wider,
    )  # fmt: skip
    return found, wider
