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
        self._waiting: deque[tuple[Sample, int]] = deque()
        self._lock = threading.Lock()
        self.received = self.dropped = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, sample: Sample) -> bool:
        """Leave a sample. False: it alone is larger than the bound and was dropped."""
        size = sample.nbytes
        with self._lock:
            self.received += 1
            if size > self.max_bytes:
                self.dropped += 1
                return False
            self._waiting.append((sample, size))
            self.bytes += size
            while self.bytes > self.max_bytes:
                _, oldest = self._waiting.popleft()
                self.bytes -= oldest
                self.dropped += 1
            return True

    def take(self, limit: int | None = None) -> list[Sample]:
        """Up to `limit` of the waiting samples, oldest first."""
        out: list[Sample] = []
        with self._lock:
            while self._waiting and (limit is None or len(out) < limit):
                sample, size = self._waiting.popleft()
                self.bytes -= size
                out.append(sample)
        return out
