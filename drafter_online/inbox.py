"""A bounded queue between an engine that captures samples and a trainer. Thread-safe; never blocks the engine.

When samples come faster than they are taken, the oldest waiting ones go and are counted: fresh feedback is worth more.
"""

from __future__ import annotations

import threading
from collections import deque

from drafter_online.samples import Sample


class Inbox:
    """Samples waiting, at most `max_bytes` of them; how many were `received` and `dropped` so far."""

    def __init__(self, max_bytes: int = 256 << 20) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._waiting: deque[Sample] = deque()
        self._lock = threading.Lock()
        self.received = self.dropped = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, sample: Sample) -> None:
        """Leave a sample."""
        with self._lock:
            self.received += 1
            self._waiting.append(sample)
            self.bytes += sample.nbytes
        self.keep(self.max_bytes)

    def keep(self, most: int) -> None:
        """Drop the oldest until at most so many bytes wait."""
        with self._lock:
            while self.bytes > most and self._waiting:
                self.bytes -= self._waiting.popleft().nbytes
                self.dropped += 1

    def take(self, most: int | None = None) -> list[Sample]:
        """Up to `most` of the waiting samples, oldest first."""
        with self._lock:
            count = len(self._waiting) if most is None else min(most, len(self._waiting))
            out = [self._waiting.popleft() for _ in range(count)]
            self.bytes -= sum(s.nbytes for s in out)
        return out
