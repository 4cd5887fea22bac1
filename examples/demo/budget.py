"""How many training steps fit into the minutes that the demonstration may take, judged by its own first steps."""

from __future__ import annotations

import time
from collections.abc import Callable

CLOSING = 30.0  # seconds that ending the jobs and writing the page take
EPOCHS = 2  # at least: drafts from the past begin with the second


class Budget:
    """The first run ends with the last epoch that fits when every run has as many steps; later runs copy it.

    Args:
        seconds: for everything, from now on.
        runs: jobs that share them.
        per_epoch: training steps of an epoch.
        clock: seconds that pass.
    """

    def __init__(self, seconds: float, runs: int, per_epoch: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self.runs, self.per_epoch, self._clock = seconds, runs, per_epoch, clock
        self.steps: int | None = None  # of every run, once the first one is over
        self._began = self._started = clock()
        self._ends: list[float] = []

    def start(self) -> None:
        """A run begins."""
        self._started, self._ends = self._clock(), []

    def step(self) -> None:
        """A training step of it ended."""
        self._ends.append(self._clock())

    def enough(self) -> bool:
        """Whether the run has the steps that it should have."""
        done = len(self._ends)
        if self.steps is not None:
            return done >= self.steps
        return done >= EPOCHS * self.per_epoch and done % self.per_epoch == 0 and not self._fits(done + self.per_epoch)

    def _fits(self, steps: int) -> bool:
        """Whether all runs can have so many; the first step of a run ends when everything is started and built."""
        pace = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        run = self._ends[0] - self._started + (steps - 1) * pace
        return self._started - self._began + self.runs * run + CLOSING <= self.seconds
