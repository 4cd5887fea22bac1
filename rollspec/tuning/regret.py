"""How far from optimal: what other settings would have taken for the same tokens, replayed through the cost model.

Without drafts every response gets a token a step, so that those of one length end together, where drafts let them part:
`fixed/none` is each batch of responses run again that way. Of the other settings it is not known when which response
would have ended; an arm's rate per batch bucket gives its time for the tokens that were really emitted there:

    fixed/none     no speculation
    fixed/<arm>    one arm for everything
    oracle         the best arm of each bucket, known in hindsight, or no speculation at all if that is better
    clairvoyant    the best arm of each step, knowing what will be accepted: no strategy can reach it
    perfect        a drafter whose drafts are always accepted, at the best K for each bucket

The model may favour an arm. So `clock/played` and `clock/oracle` are the same two times, with each arm's modelled
seconds corrected by what its own steps took in that bucket where enough of them were timed; elsewhere as the whole
bucket was. They are left out where no steps were timed.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rollspec.tuning.cost import CostModel
from rollspec.tuning.strategy import Arm, Outcome, Vector

MOST = 1 << 16
"""Responses that are kept between two calls of `close`: a server whose counters are never read keeps no more."""
TIMED = 16
"""Timed steps of an arm in a bucket, from which on its seconds are corrected by them."""


@dataclass(slots=True)
class _Sums:
    emitted: Vector  # [arms], as the next three
    seconds: Vector
    played: Vector  # seconds of the steps that played it
    timed: Vector  # [3, arms]: how many of those were timed by themselves, their seconds by the clock, and modelled
    tokens: float = 0.0  # that were emitted
    seen: Vector = field(default_factory=lambda: np.zeros(2))  # of the best arm per step
    perfect: float = 0.0


class Ledger:
    """Sums since the last `close`. Seconds are the cost model's, for the played arm too, so that they compare."""

    def __init__(self, arms: Sequence[Arm]) -> None:
        self._arms = arms
        self._sums: dict[int, _Sums] = {}
        self._responses: deque[tuple[int, int]] = deque(maxlen=MOST)
        self._context = np.zeros(2)  # context tokens, requests
        self.ended = 0
        """Responses, since the last `close`."""

    def end(self, after: int, tokens: int) -> None:
        """A response ended that takes `tokens` decode steps without drafts; `after`: how many had ended when it
        began.
        """
        self._responses.append((after, tokens))
        self.ended += 1

    def add(self, bucket: int, outcome: Outcome, context_tokens: float, cost: CostModel, steps: int = 1) -> None:
        """One step, which stands for `steps`."""
        s = self._sums.get(bucket)
        if s is None:
            n = len(self._arms)
            s = self._sums[bucket] = _Sums(np.zeros(n), np.zeros(n), np.zeros(n), np.zeros((3, n)))
        s.emitted += steps * outcome.emitted
        s.seconds += steps * outcome.seconds
        p, best = outcome.played, int((outcome.emitted / outcome.seconds).argmax())
        tokens = steps * float(outcome.emitted[p])
        s.tokens += tokens
        s.played[p] += steps * outcome.seconds[p]
        if outcome.measured is not None:
            s.timed[:, p] += (1.0, outcome.measured, outcome.seconds[p])
        s.seen += (steps * outcome.emitted[best], steps * outcome.seconds[best])
        batch, most = outcome.batch, max(a.k for a in self._arms)
        self._context += (steps * context_tokens, steps * batch)
        curve = cost.curve(batch, batch * most, context_tokens)[::batch]
        s.perfect += tokens * float((curve / (batch * np.arange(1.0, most + 2.0))).min())

    def totals(self) -> dict[int, tuple[list[float], list[float]]]:
        """By batch bucket: tokens and modelled seconds under each arm since the last call of `close`."""
        return {b: (s.emitted.tolist(), s.seconds.tolist()) for b, s in self._sums.items()}

    def close(self, running: Iterable[tuple[int, int]], alone: Callable[[int, float], float]) -> dict[str, float]:
        """Modelled seconds for the tokens emitted since the last call, by setting; empty if nothing was.

        `running`: responses that have not ended, as `end` gets them. `alone(batch, context_tokens)`: seconds of a step
        without drafts.
        """
        sums, self._sums = self._sums, {}
        steps = without_drafts([*self._responses, *running])
        self._responses.clear()
        context, requests = self._context.tolist()
        self._context[:] = self.ended = 0
        if not sums:
            return {}
        fixed = np.zeros(len(self._arms))
        oracle = clairvoyant = perfect = played = tokens = clock_played = clock_oracle = 0.0
        for s in sums.values():
            times = s.tokens * s.seconds / s.emitted
            fixed += times
            oracle += float(times.min())
            clairvoyant += float(s.tokens * s.seen[1] / s.seen[0])
            perfect += s.perfect
            played += float(s.played.sum())
            tokens += s.tokens
            scale = _by_clock(s.timed)
            clock_played += float((s.played * scale).sum())
            clock_oracle += float((times * scale).min())
        timed: Vector = np.sum([s.timed for s in sums.values()], axis=0)
        seconds = {f"fixed/{arm.name}": float(t) for arm, t in zip(self._arms, fixed, strict=True)}
        if replayed := sum(batch * n for batch, n in steps.items()):
            # Rows whose proposal was not known are in no sum, so the two need not count the same tokens.
            took = sum(n * alone(batch, batch * context / requests) for batch, n in steps.items())
            none = seconds["fixed/none"] = tokens / replayed * took
            oracle = min(oracle, none)
            at = next(i for i, arm in enumerate(self._arms) if not arm.k)
            clock_oracle = min(clock_oracle, none * float(_by_clock(timed)[at]))
        if timed[0].sum() >= TIMED:
            seconds |= {"clock/played": clock_played, "clock/oracle": clock_oracle}
        clairvoyant = min(clairvoyant, oracle)
        return {"played": played, "oracle": oracle, "clairvoyant": clairvoyant, "perfect": perfect, **seconds}


def _by_clock(timed: Vector) -> Vector:
    """What each arm's modelled seconds are multiplied by, to be those of the clock. `timed`: as `_Sums` has it."""
    count, clock, modelled = timed
    whole = clock.sum() / modelled.sum() if count.sum() >= TIMED else 1.0
    return np.where(count >= TIMED, clock / np.maximum(modelled, 1e-12), whole)


def without_drafts(responses: Iterable[tuple[int, int]]) -> Mapping[int, int]:
    """Decode steps by batch size that the responses take without drafts.

    `responses`: how many had ended when each began, and its tokens. It begins again when as many have ended, which
    keeps the order of a rollout whose prompts wait for a place in the batch.
    """
    steps: Counter[int] = Counter()
    waiting = sorted(responses, reverse=True)
    ends: list[int] = []  # heap: of what runs
    now = ended = 0
    while waiting or ends:
        if not ends:  # what it waited for ended in an earlier interval
            ended = max(ended, waiting[-1][0])
        while waiting and waiting[-1][0] <= ended:
            heapq.heappush(ends, now + waiting.pop()[1])
        if ends[0] > now:
            steps[len(ends)] += ends[0] - now
        now = heapq.heappop(ends)
        ended += 1
    return steps
