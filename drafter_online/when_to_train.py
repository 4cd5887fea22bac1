"""SpecBlock's cost-aware choice of when to train (arXiv:2605.07243): a round only where it is expected to pay.

Its abstract: a bandit uses the verifier's feedback, which is free, to update the drafter only when the expected gain in
throughput exceeds the cost of the update. Only the abstract is known here, so estimates and formula are ours:

    train  <=>  S * (1 - t / (t + g)) > C

    t  tokens emitted per request and step since the last decision
    S  seconds of the engine's steps since then: what is to come is taken to be like it
    g  the gain in t that a round is expected to bring: the discounted mean of what past rounds brought, or what was
       lost since the last round where that is more (the policy or the traffic has changed)
    C  seconds of training that a round takes, the latest measured

The first rounds are always trained: nothing is known of g and C before. Without feedback there is no round.
"""

from __future__ import annotations

FIRST = 2
"""Rounds that are trained whatever they cost."""

KEEP = 0.7
"""Of the mean gain, per round."""


class WhenItPays:
    """Decides for one trainer; `every` optimiser steps are a round. Times in seconds, lengths in tokens."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.gain = 0.0
        self.cost = 0.0
        self.rounds = 0  # that were trained
        self.skipped = 0  # decisions against one
        self._until = 0  # optimiser steps at which the running round ends
        self._spent = 0.0  # training seconds of the running round
        self._emitted = self._rows = 0  # since the last decision
        self._seconds = 0.0
        self._before: float | None = None  # `t` before the last round, whose gain is not known yet
        self._after: float | None = None  # `t` right after it

    def served(self, emitted: int, rows: int, seconds: float) -> None:
        """A step of `rows` requests emitted tokens."""
        self._emitted, self._rows, self._seconds = self._emitted + emitted, self._rows + rows, self._seconds + seconds

    def trained(self, seconds: float) -> None:
        """A micro-step ran."""
        self._spent += seconds

    def allows(self, steps: int) -> bool:
        """Whether to go on training after `steps` optimiser steps."""
        if steps < self._until:
            return True
        if self._spent:
            self.cost, self._spent = self._spent, 0.0
        if not self._rows or not self._pays(self._emitted / self._rows):
            return False
        self._until = (steps // self.every + 1) * self.every
        self.rounds += 1
        return True

    def _pays(self, length: float) -> bool:
        if self._before is not None:
            found = length - self._before
            self.gain = found if self.rounds == 1 else KEEP * self.gain + (1 - KEEP) * found
            self._before, self._after = None, length
        lost = 0.0 if self._after is None else self._after - length
        gain, seconds = max(self.gain, lost), self._seconds
        self._emitted = self._rows = 0
        self._seconds = 0.0
        pays = self.rounds < FIRST or (gain > 0 and seconds * (1 - length / (length + gain)) > self.cost)
        if pays:
            self._before = length
        else:
            self.skipped += 1
        return pays
