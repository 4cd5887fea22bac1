"""A clock and a queue with parallel channels, on a heap of events."""

from __future__ import annotations

import functools
import heapq
import itertools
from collections import deque
from collections.abc import Callable


class Clock:
    """Runs callbacks in the order of their times; those of one time in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        """Run `do` in `seconds`."""
        heapq.heappush(self._heap, (self.now + max(seconds, 0.0), next(self._order), do))

    def run(self, until: float) -> None:
        """Advance to `until`."""
        while self._heap and self._heap[0][0] <= until:
            self.now, _, do = heapq.heappop(self._heap)
            do()
        self.now = until


class Queue:
    """First come, first served, by `channels` servers; each job says how long it takes.

    `busy` is the sum of the seconds served, over channels.
    """

    def __init__(self, clock: Clock, channels: int = 1) -> None:
        self.clock = clock
        self.free = channels
        self.busy = 0.0
        self._waiting: deque[tuple[float, Callable[[], None]]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, seconds: float, done: Callable[[], None]) -> None:
        """Serve a job; `done` is called when it is."""
        self._waiting.append((seconds, done))
        self._next()

    def add(self, channels: int = 1) -> None:
        """More servers."""
        self.free += channels
        self._next()

    def drop(self) -> bool:
        """Throw away the job that has waited longest; False where none waits."""
        if not self._waiting:
            return False
        self._waiting.popleft()
        return True

    def _next(self) -> None:
        while self.free and self._waiting:
            self.free -= 1
            seconds, done = self._waiting.popleft()
            self.busy += seconds
            self.clock.after(seconds, functools.partial(self._served, done))

    def _served(self, done: Callable[[], None]) -> None:
        self.free += 1
        done()
        self._next()
