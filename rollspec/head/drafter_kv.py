"""What a draft head has read of each running request, and what it must read again.

While a drafter rests, positions go by that its own KV cache lacks; after its weights were replaced, what it holds is
stale. Both are repaired from the target's hidden states there, kept as far as the byte bound allows. Per request:

    base        stale         done          end
     |---kept----|----fresh----|----unread---|        positions

    [base, end)  hidden states are kept; below `base` they are not (a cached prefix, or dropped for room)
    [base, stale) the drafter's KV was written by older weights    [done, end) it was not written at all
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True)
class Entry:
    """One request. `parts`: from `base` on, in order, hidden states [n, A*H], or n where none are needed."""

    base: int
    end: int
    done: int
    stale: int  # rows below it are to be read again
    fresh: int  # where reading again has got to
    origin: int  # where the request's first kept position was
    clean: bool = True  # False once some KV of older weights cannot be replaced
    parts: list[Any] = field(default_factory=list)

    def rows(self, start: int, stop: int) -> torch.Tensor | None:
        """Hidden states of positions [start, stop), or None where the drafter needs none."""
        at, found = self.base, []
        for part in self.parts:
            if not isinstance(part, torch.Tensor):
                return None
            n = len(part)
            if at < stop and at + n > start:
                found.append(part[max(start - at, 0) : stop - at])
            at += n
        return torch.cat(found) if found else None


class DrafterKV:
    """Entries of all running requests. At most `max_bytes` of states of `width` (A*H; 0 for a drafter that reads tokens
    only) numbers of `itemsize` bytes are kept, and `max_rows` positions left unread.
    """

    def __init__(self, max_bytes: int, max_rows: int, width: int, itemsize: int) -> None:
        self.max_bytes = max_bytes
        self._row_bytes = width * itemsize
        # Half of the room at most, so that something is left for what is read again after a swap.
        self.max_unread = min(max_rows, max_bytes // 2 // self._row_bytes) if self._row_bytes else max_rows
        self.bytes = 0
        self._entries: dict[str, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, req_id: str, start: int, rows: torch.Tensor | int) -> None:
        """The target computed positions [start, start + n) of a request; `rows`: their states [n, A*H], or n."""
        n = rows if isinstance(rows, int) else len(rows)
        entry = self._entries.get(req_id)
        if entry is None or entry.end != start:
            # New, or computed again after a preemption; what lies below came from cached blocks.
            self.drop(req_id)
            entry = self._entries[req_id] = Entry(start, start, start, start, start, start)
        entry.parts.append(rows)
        entry.end += n
        self.bytes += n * self._row_bytes

    def drop(self, req_id: str) -> None:
        """The request ended."""
        entry = self._entries.pop(req_id, None)
        if entry is not None:
            self.bytes -= (entry.end - entry.base) * self._row_bytes

    def read(self, req_ids: list[str]) -> None:
        """The drafter ran over all that these requests have."""
        for req_id in req_ids:
            if (entry := self._entries.get(req_id)) is not None:
                entry.done = entry.end

    def rewind(self) -> int:
        """The drafter's weights were replaced: what it read is stale. Returns the positions that can be read again."""
        total = 0
        for entry in self._entries.values():
            # What lies below `base`, or was dropped while stale, cannot be read again.
            entry.clean &= entry.base == entry.origin
            entry.stale, entry.fresh = entry.done, entry.base
            total += entry.stale - entry.fresh
        return total

    def unread(self, req_ids: list[str], before: dict[str, int]) -> Iterator[tuple[int, Entry, int, int]]:
        """(row, entry, start, stop) of what the drafter has not read of positions before `before[req_id]`."""
        for i, req_id in enumerate(req_ids):
            entry = self._entries.get(req_id)
            if entry is not None and entry.done < before[req_id]:
                yield i, entry, entry.done, before[req_id]

    def stale(self, req_ids: list[str], most: int) -> Iterator[tuple[int, Entry, int, int]]:
        """The same of what it read with older weights, up to `most` positions in all."""
        for i, req_id in enumerate(req_ids):
            entry = self._entries.get(req_id)
            if entry is None or entry.fresh >= entry.stale:
                continue
            if most <= 0:
                return
            stop = min(entry.stale, entry.fresh + most)
            most -= stop - entry.fresh
            yield i, entry, entry.fresh, stop

    def current(self, req_id: str) -> bool:
        """Whether all of the drafter's KV of a request was written by its present weights."""
        entry = self._entries.get(req_id)
        return entry is not None and entry.clean and entry.fresh >= entry.stale

    @property
    def full(self) -> bool:
        """Whether so much is unread that the drafter must run now."""
        return sum(e.end - e.done for e in self._entries.values()) > self.max_unread

    def trim(self) -> None:
        """Keep the bound: states of what was read go first, longest requests first; they serve only after a swap."""
        if self.bytes <= self.max_bytes:
            return
        entries = sorted(self._entries.values(), key=lambda e: (e.fresh < e.stale, e.base - e.end))
        for entry in entries:
            if entry.done == entry.end and entry.parts:
                self.bytes -= (entry.end - entry.base) * self._row_bytes
                entry.clean &= entry.fresh >= entry.stale  # what was stale is still stale
                entry.base = entry.fresh = entry.stale = entry.end
                entry.parts = []
                if self.bytes <= self.max_bytes:
                    return
