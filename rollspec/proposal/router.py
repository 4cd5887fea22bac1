"""Which drafter serves a request, and whether the draft head is worth running at all.

Suffix drafts cost host time only and are looked up first; what the draft head's passes would add is estimated before
they run. A draft is worth Σ max(0, p - v), with p its cumulative acceptance probabilities and v the price of verifying
one token, in tokens: what a budget that stops where p < v gains. d passes are run if what the requests gain by them is
more than the engine would emit in the time they take.

One-hot proposals only: with these, any choice between drafts is lossless, even one that looks at the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollspec.tuning.strategy import Vector, bucket_of, restored

PRIOR = 0.6  # acceptance per position that a drafter without a record is given: enough to be tried

PRIOR_WEIGHT = 8.0
MEMORY = 400.0  # observations per position after which the past is halved
TRUST_WEIGHT = 6.0  # tokens of one request's own record that count as much as what holds for all requests
UNSEEN_PASS = 0.05  # part of a step that a drafter's pass is taken to cost before one was timed


def worth(probs: Sequence[float], price: float) -> float:
    """Tokens gained by verifying a draft of cumulative probabilities `probs` at `price` tokens each."""
    total = 0.0
    for p in probs:
        if p <= price:
            break
        total += p - price
    return total


def gains(expected: Vector, have: Sequence[float], price: float) -> Vector:
    """Tokens that a batch gains by 0, 1, ... k passes over drafts worth `have`, from `expected` [requests, k], the
    cumulative acceptance of what they propose. Shape [k + 1].
    """
    worths = np.cumsum(np.maximum(expected - price, 0.0), axis=1)  # [requests, k]
    return np.append(0.0, np.maximum(worths - np.array(have)[:, None], 0.0).sum(0))


def best_passes(gains: Vector, costs: Vector, rate: float, most: int) -> int:
    """How many passes, up to `most`, gain most beyond what the engine emits meanwhile at `rate` tokens/s."""
    return int((gains - rate * costs)[: most + 1].argmax())


class HeadAcceptance:
    """How often the draft head's i-th token is what the target says, given that those before it were."""

    def __init__(self, k: int) -> None:
        self.prior: Vector = np.full(k, PRIOR)  # what was hoped for before anything was seen
        self.accepted: Vector = np.zeros(k)
        self.tries: Vector = np.zeros(k)

    @property
    def rates(self) -> Vector:
        """Per position, prior included. Shape [k].

        A position is expected to be as much above or below its own prior as the one before it: of drafts that are not
        verified only the first token is known, and a head that is good there is hardly bad after it.
        """
        rates: list[float] = []
        better = 0.0  # floats below: every scored draft asks for this, and NumPy's scalars take twice as long
        rows = zip(self.accepted.tolist(), self.tries.tolist(), self.prior.tolist(), strict=True)
        for accepted, tries, prior in rows:
            hoped = min(max(prior + better, 0.0), 1.0)
            rates.append((accepted + PRIOR_WEIGHT * hoped) / (tries + PRIOR_WEIGHT))
            better = rates[-1] - prior
        return np.array(rates)

    @property
    def measured(self) -> Vector:
        """Per position, what was seen only; 0 where nothing was. Shape [k]."""
        measured: Vector = self.accepted / np.maximum(self.tries, 1.0)
        return measured

    def expected(self, trust: Sequence[float]) -> Vector:
        """Cumulative acceptance to expect of each request's next draft. Shape [requests, k]."""
        return np.cumprod(np.minimum(np.array(trust)[:, None] * self.rates[None], 0.999), axis=1)

    def observe(self, accepted: int, known: int) -> None:
        """A draft's first `accepted` tokens were accepted; `known` of its positions are (`accepted` or one more)."""
        for i in range(min(known, len(self.tries))):
            if self.tries[i] >= MEMORY:
                self.tries[i] *= 0.5
                self.accepted[i] *= 0.5
            self.tries[i] += 1.0
            self.accepted[i] += i < accepted

    def changed(self) -> None:
        """The drafter's weights were replaced: what was seen is a hint only, and hope is renewed."""
        rates = self.rates
        self.prior = np.maximum(rates, 0.5 * (rates + PRIOR))
        self.accepted, self.tries = np.zeros_like(self.accepted), np.zeros_like(self.tries)

    def state(self) -> dict[str, list[float]]:
        """What was seen, in JSON types."""
        return {name: value.tolist() for name, value in vars(self).items()}

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        """Restore what `state` returned; positions that it lacks are unknown.

        Raises:
            ValueError, KeyError, TypeError: `state` cannot be used; nothing of it is.
        """
        fresh = vars(HeadAcceptance(len(self.tries)))
        rows = {name: [*state[name], *x[len(state[name]) :]][: len(x)] for name, x in fresh.items()}
        found = restored(rows, fresh)
        if (found["accepted"] > found["tries"]).any() or (found["prior"] > 1).any():
            raise ValueError("acceptance above 1")
        self.prior, self.accepted, self.tries = found.values()


class PassCost:
    """Seconds that d passes of the drafter take, per batch bucket; the first reads all that was verified.

    The first pass at a batch size may compile something, or find its memory cold. What was timed once says only how
    cheap passes are, not how dear: a head would rest because of it, and not be timed again.
    """

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int], list[float]] = {}  # (bucket, passes) -> [seconds, weight]
        self._after_rest: dict[int, list[tuple[float, float]]] = {}  # bucket -> last two: seconds, those to catch up
        self.each = 0.0  # mean seconds of a pass; 0 before one was timed
        self._timed = 0  # how often, two at most

    def observe(self, batch: int, passes: int, seconds: float) -> None:
        """`passes` passes for `batch` requests took `seconds`."""
        if passes <= 0 or seconds <= 0.0:
            return
        cell = self._cells.setdefault((bucket_of(batch), passes), [seconds, 0.0])
        if cell[1] == 1.0:
            cell[0] = min(cell[0], seconds)
        cell[1] = min(cell[1] + 1.0, 64.0)
        cell[0] += (min(seconds, 2.0 * cell[0]) - cell[0]) / cell[1]
        each = seconds / passes
        if self._timed < 2:
            self.each, self._timed = min(each, self.each or each), self._timed + 1
        else:
            self.each += (min(each, 2.0 * self.each) - self.each) / 32.0

    def rested(self, batch: int, passes: int, seconds: float, late: float) -> None:
        """They took `seconds` after a rest, with weights in no cache: an estimate above that was too high. Before them
        reading all that the drafter had missed took `late`.
        """
        if 0.0 < seconds < self.seconds(batch, passes, 0.0):
            self._cells[bucket_of(batch), passes] = [seconds, 1.0]
        known = self._after_rest.setdefault(bucket_of(batch), [])
        known[:] = [*known[-1:], (seconds + late, late)]

    def after_rest(self, batch: int) -> tuple[float, float] | None:
        """Seconds that passes take after a rest, and of these those to catch up. None before two were seen: the first
        may have compiled something.
        """
        known = self._after_rest.get(bucket_of(batch), ())
        return min(known) if len(known) > 1 else None

    def state(self) -> dict[str, Any]:
        """Everything, in JSON types."""
        return {"each": self.each, "cells": [[b, p, *cell] for (b, p), cell in self._cells.items()]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Start from what `state` gave.

        Raises:
            ValueError, KeyError, TypeError: it cannot be used; nothing of it is.
        """
        each = float(state["each"])
        cells = {(int(b), int(p)): [float(seconds), float(n)] for b, p, seconds, n in state["cells"]}
        if not all(0.0 <= x < float("inf") for x in (each, *(x for cell in cells.values() for x in cell))):
            raise ValueError(f"passes of {each!r} s")
        self.each, self._cells = each, cells

    def seconds(self, batch: int, passes: int, step: float) -> float:
        """Predicted; `step` is the duration of a step, used before passes were timed twice at this batch size."""
        if passes <= 0:
            return 0.0
        bucket = bucket_of(batch)
        known = {p: c[0] for (b, p), c in self._cells.items() if b == bucket and c[1] > 1.0}
        if known:
            nearest = min(known, key=lambda p: abs(p - passes))
            return known[nearest] * passes / nearest
        # Cheap enough to be tried, twice.
        unseen = passes * min(self.each or np.inf, UNSEEN_PASS * step)
        once = self._cells.get((bucket, passes))
        return min(once[0], unseen) if once else unseen
