"""How many training steps fit into the minutes that the demonstration may take, judged by its own first steps."""

from __future__ import annotations

import time
from collections.abc import Callable

CLOSING = 30.0  # seconds that ending the jobs and writing the page take
EPOCHS = 2  # at least, where the time is enough: drafts from the past begin with the second
LEAST = 2  # steps of the second epoch that a run makes even if its time is over


class Budget:
    """The first run ends with the last epoch that fits when every run has as many steps; later runs copy it.

    A run whose share of the time is over before ends within the second epoch: the steps that all have are compared.

    Args:
        seconds: for everything, from now on.
        runs: jobs that share them.
        per_epoch: training steps of an epoch.
        clock: seconds that pass.
    """

    def __init__(self, seconds: float, runs: int, per_epoch: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self.runs, self.per_epoch, self._clock = seconds, runs, per_epoch, clock
        self.steps: int | None = None  # of every run, once the first one is over
        self._left = runs + 1  # that have not ended, once one begins
        self._began = self._started = clock()
        self._ends: list[float] = []

    def start(self) -> None:
        """A run begins."""
        self._started, self._ends = self._clock(), []
        self._left = max(1, self._left - 1)

    def step(self) -> None:
        """A training step of it ended."""
        self._ends.append(self._clock())

    def enough(self) -> bool:
        """Whether the run has the steps that it should have."""
        done = len(self._ends)
        if done >= self.per_epoch + LEAST and self._over():
            return True
        if self.steps is not None:
            return done >= self.steps
        return done >= EPOCHS * self.per_epoch and done % self.per_epoch == 0 and not self._fits(done + self.per_epoch)

    @property
    def _pace(self) -> float:
        """Seconds of a step; the first one of a run ends when everything is started and built."""
        return (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)

    def _over(self) -> bool:
        """Whether one more step would take more than this run's share of what was left when it began."""
        share = (self.seconds - CLOSING - (self._started - self._began)) / self._left
        return self._ends[-1] + self._pace - self._started > share

    def _fits(self, steps: int) -> bool:
        """Whether all runs can have so many."""
        run = self._ends[0] - self._started + (steps - 1) * self._pace
        return self._started - self._began + self.runs * run + CLOSING <= self.seconds
