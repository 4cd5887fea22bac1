"""What followed short contexts: counts or votes per n-gram, added to while texts grow, never rebuilt.

    text    4 9 5 8 ... 4 9 5 3 ... 4 9 5 8        contexts of two tokens:   (9, 5) -> {8: 2, 3: 1}

A context is packed into one integer and a row of followers is a dictionary.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

Row = dict[int, int]  # follower -> how often it followed, or one bit per sibling that emitted it

MIN_PROB = 0.1
"""A chain ends where its cumulative probability falls below this; later tokens would rarely pay for verification."""

UNSEEN = 0.25  # observations of a follower that did not show yet: a share that rests on few observations promises less
FOLLOWERS = 10  # followers counted per context, the most frequent ones
ROW_BYTES = 350  # about what a row takes: nearly all have one follower
_BITS = 21  # of a token in a packed context


class Ngrams:
    """Rows by context. `lengths`: of the contexts that are kept, in tokens."""

    __slots__ = ("lengths", "order", "rows")

    def __init__(self, *lengths: int) -> None:
        self.lengths, self.order = frozenset(lengths), max(lengths)
        self.rows: dict[int, Row] = {}

    def add(self, text: Sequence[int], new: int, voter: int = 0) -> None:
        """The last `new` tokens of `text` follow what stands before each of them.

        `voter`: a power of two, whose bit each follower gets; 0: followers are counted.
        """
        rows, lengths, order = self.rows, self.lengths, self.order
        for at in range(max(1, len(text) - new), len(text)):
            token, key = text[at], 0
            for back in range(1, min(order, at) + 1):
                key |= text[at - back] + 1 << _BITS * (back - 1)
                if back not in lengths:
                    continue
                row = rows.get(key)
                if row is None:
                    rows[key] = {token: voter or 1}
                elif voter:
                    row[token] = row.get(token, 0) | voter
                elif token in row:
                    row[token] += 1
                else:
                    if len(row) >= FOLLOWERS:
                        del row[min(row, key=row.__getitem__)]
                    row[token] = 1

    def after(self, tail: Sequence[int]) -> tuple[Row, int]:
        """The row of the longest known context that `tail` ends with, and that context's length; ({}, 0) for none."""
        key, found, length = 0, _NOTHING, 0
        for back in range(1, min(self.order, len(tail)) + 1):
            key |= tail[-back] + 1 << _BITS * (back - 1)
            if back in self.lengths:
                row = self.rows.get(key)
                if row is None:
                    break  # where a longer context was added, so was the shorter one
                found, length = row, back
        return found, length

    def follow(
        self, tail: Sequence[int], room: int, choose: Callable[[Row, int], tuple[int, float]]
    ) -> tuple[list[int], list[float], int]:
        """At most `room` tokens after `tail`, their cumulative probabilities, and the first one's match length.

        `choose`: from a row and the place in the chain to a follower and its probability; 0 ends the chain.
        """
        text, probs, matched, cumulative = list(tail), [], 0, 1.0
        for place in range(room):
            row, length = self.after(text)
            if not row:
                break
            token, p = choose(row, place)
            cumulative *= p
            if cumulative < MIN_PROB:
                break
            text.append(token)
            probs.append(cumulative)
            matched = matched or length
        return text[len(tail) :], probs, matched

    def shrink(self, most: int) -> None:
        """Age the oldest rows until `most` are left: their counts are halved, and what was seen once goes."""
        while (excess := len(self.rows) - most) > 0:
            for key in list(islice(self.rows, excess)):
                row = self.rows.pop(key)
                if kept := {token: n >> 1 for token, n in row.items() if n > 1}:
                    self.rows[key] = kept


_NOTHING: Row = {}


def likeliest(row: Row, place: int) -> tuple[int, float]:
    """The most frequent follower, of equal ones the first seen, and its share."""
    token = max(row, key=row.__getitem__)
    return token, row[token] / (sum(row.values()) + UNSEEN)


@dataclass(slots=True)
class PromptTable:
    """What the requests of one prompt emitted under one policy version."""

    key: str
    version: int
    ngrams: Ngrams
    joined: int = 0  # requests so far
    running: int = 0  # of these


class PromptTables:
    """One table per prompt, of its latest policy version; the least recently used go first.

    `most`: rows of all tables. Those of running requests stay; one that reaches so many alone is begun anew.
    """

    def __init__(self, most: int, *lengths: int) -> None:
        self._most, self._lengths = most, lengths
        self._tables: OrderedDict[str, PromptTable] = OrderedDict()

    def open(self, key: str, version: int) -> PromptTable:
        """The table that a request of this prompt shares with its siblings."""
        table = self._tables.get(key)
        if table is None or table.version != version or len(table.ngrams.rows) > self._most:
            table = self._tables[key] = PromptTable(key, version, Ngrams(*self._lengths))
        self._tables.move_to_end(key)
        table.joined += 1
        table.running += 1
        return table

    def close(self, table: PromptTable, private: bool) -> None:
        """One of the table's requests ended; nothing of a private one is kept."""
        table.running -= 1
        if private and self._tables.get(table.key) is table:  # else of an older version
            del self._tables[table.key]
        rows = sum(len(t.ngrams.rows) for t in self._tables.values())
        for old in list(self._tables.values()) if rows > self._most else ():
            if rows > self._most and not old.running:
                rows -= len(old.ngrams.rows)
                del self._tables[old.key]
