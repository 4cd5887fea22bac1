"""Whether what was, or will be, learned is worth its cost: when to train a round, and when to publish a version.

With acceptance length a before and b after, a token takes 1/a steps and 1/b, so of what is to come the share 1 - a/b is
saved. Acting only where that is more than the cost is SpecBlock's rule (arXiv:2605.07243: a bandit uses the verifier's
feedback to update the drafter only when the expected gain in throughput exceeds the cost of the update). Only its
abstract is known here, so estimates and formula are ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sized

COST = 8.0
"""Tokens that could be generated in the time of a swap and of a canary's first drafts."""

SMOOTHING = 0.1
"""Weight of the latest micro-step's windows."""

PATIENCE = 10
"""Times the earliest moment after which a version is published whatever it seems to give."""

FIRST = 2
"""Rounds that are trained whatever they cost: before, nothing is known of gain and cost."""

KEEP = 0.7
"""Of the mean gain, per round."""


def saved(amount: float, before: float, after: float) -> float:
    """What an acceptance length of `after` in the place of `before` saves of an amount to come."""
    return amount * (1.0 - before / after) if after else 0.0


class Worth:
    """When to publish: follows the acceptance length of the training windows from one version to the next.

    They are of the present target and traffic, so the lowest since the last version is what that version reaches on
    them: where the policy moves or the traffic shifts it falls, and training raises it again.
    """

    def __init__(self, interval: int = 0) -> None:
        self.interval = interval
        self._now = self._least = 0.0
        self._policy: int | None = None  # its version at the latest publication

    def observe(self, length: float) -> None:
        """Acceptance length of a micro-step's windows."""
        if not self._now:
            self._now = self._least = length
        self._now += SMOOTHING * (length - self._now)
        self._least = min(self._least, self._now)

    def published(self, policy: int) -> None:
        """The present weights are the engine's, which samples from this version of the policy."""
        self._least, self._policy = self._now, policy

    def waits(self, policy: int) -> bool:
        """Whether fewer than `interval` versions of the policy came since the latest publication (ReSpec's update
        interval). A policy whose version stays 0 does not move: nothing waits for it.
        """
        return policy > 0 and self._policy is not None and 0 <= policy - self._policy < self.interval

    def pays(self, samples: Iterable[Sized], steps: int, earliest: int) -> bool:
        """Whether to publish now, `steps` after the last version and never before `earliest`; as many tokens as the
        `samples` of late have are expected to come.
        """
        if steps < earliest:
            return False
        return steps >= PATIENCE * earliest or saved(sum(map(len, samples)), self._least, self._now) > COST


class WhenItPays:
    """When to train (`drafter.train_when: pays`); `every` optimiser steps are a round.

    S seconds of steps at t tokens per request and step came since the last round, and as much is taken to come. The
    gain in t that a round is expected to bring is the discounted mean of what past rounds brought, or what was lost
    since the last one where that is more. A round is trained where that saves more of S than the latest one took.
    Without feedback there is no round.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.gain = self.cost = 0.0
        self.rounds = 0  # that were trained
        self.skipped = 0  # decisions against one
        self._until = 0  # optimiser steps at which the running round ends
        self._spent = 0.0  # training seconds of the running round
        self._emitted = self._rows = 0  # since the last round began
        self._seconds = 0.0
        self._refused = 0  # rows at the last decision against a round
        self._before: float | None = None  # t before the last round, whose gain is not known yet
        self._after = 0.0  # t right after it

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
        if not self._rows:
            return False
        length, seconds = self._emitted / self._rows, self._seconds
        if self._before is not None:
            found = length - self._before
            self.gain = found if self.rounds == 1 else KEEP * self.gain + (1 - KEEP) * found
            self._before, self._after = None, length
        gain = max(self.gain, self._after - length)
        if self.rounds >= FIRST and (gain <= 0 or saved(seconds, length, length + gain) <= self.cost):
            self.skipped += self._rows != self._refused
            self._refused = self._rows
            return False
        self._emitted, self._rows, self._seconds, self._refused = 0, 0, 0.0, 0
        self._before = length
        self._until = (steps // self.every + 1) * self.every
        self.rounds += 1
        return True
