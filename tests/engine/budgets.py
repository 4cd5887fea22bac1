"""How DAS has to share the budget of a step, computed from what its requests emitted and its drafts promised.

`events` are those of `noted.note_drafter` and `noted.note_budget`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from rollspec.drafting.selection import LEAST, LENGTHS_EVERY, MARGIN

LIMITS = 0.5, 2.0  # least and most that a token counts, before weights are scaled to a mean of 1


def by_length(events: Iterable[tuple[Any, ...]], power: float) -> Counter[str]:
    """Every step verifies what emits most per second, where a token counts (remaining / mean)^p of its request. p is
    `power`, less the share of ends that waiting requests fill.

    Counts the steps, those that would be shared otherwise with equal weights or the inverse ones, and those where a
    request that runs longer than the mean has more than with equal weights.
    """
    lengths, found = Lengths(), Counter[str]()
    for event, *said in events:
        if event != "shared":
            lengths.observe(event, *said)
            continue
        filled, copies, seconds, rows = said
        p = power * (1.0 - filled)
        if len(rows) < 2 or p <= 0.05 or not any(draft for _, _, draft, _ in rows):
            continue
        left = [lengths.remaining(request, most) for request, most, _, _ in rows]
        mean = sum(left) / len(left)
        raw = [min(max((x / mean) ** p, LIMITS[0]), LIMITS[1]) if mean else 1.0 for x in left]
        step = Budget([draft for _, _, draft, _ in rows], [w * len(raw) / sum(raw) for w in raw], seconds, copies)
        best, shares = step.goodput(step.best(step.weights)), [n for *_, n in rows]
        assert step.goodput(shares) > best - 1e-9, (rows, left, step.weights)
        equal, inverse = step.best([1.0] * len(rows)), step.best([1.0 / w for w in step.weights])
        found["steps"] += 1
        found["not the likeliest"] += step.goodput(equal) < best - 1e-9
        found["not the shortest"] += step.goodput(inverse) < best - 1e-9
        found["more of the longest"] += any(n > e and x > mean for n, e, x in zip(shares, equal, left, strict=True))
    return found + Counter(known=lengths.known)


class Lengths:
    """How much longer requests are expected to run. `known`: how often finished responses said it."""

    def __init__(self) -> None:
        self.known = 0
        self._key: dict[str, str] = {}
        self._emitted: Counter[str] = Counter()
        self._ended: dict[str, list[int]] = defaultdict(list)  # tokens of finished responses, by prompt
        self._latest: dict[str, tuple[int, float]] = {}  # tokens emitted from which on it is too old, and the number

    def observe(self, event: str, request: str, *said: Any) -> None:
        """What a drafter receives."""
        if event == "begin":
            self._key[request] = said[0]
        elif event == "emit":
            self._emitted[request] += len(said[0])
        elif event == "end":
            self._ended[self._key[request]].append(self._emitted[request])

    def remaining(self, request: str, most: int) -> float:
        """Tokens, of which there are `most` in all: the mean of longer responses, else as many again."""
        n = self._emitted[request]
        if n >= self._latest.get(request, (0, 0.0))[0]:
            longer = [other for other in self._ended[self._key[request]] if other > n]
            self.known += bool(longer)
            left = sum(longer) / len(longer) - n if longer else max(n, 1)
            self._latest[request] = n + LENGTHS_EVERY, min(left, most - n)
        return self._latest[request][1]


class Budget:
    """A step's drafts, as cumulative chances of acceptance; weights of their tokens; seconds by draft tokens; and how
    many requests each draft stands for.
    """

    def __init__(
        self, drafts: Sequence[Sequence[float]], weights: Sequence[float], seconds: Sequence[float], copies: float
    ) -> None:
        self.drafts, self.weights, self.seconds, self.copies = drafts, weights, seconds, copies

    def goodput(self, shares: Sequence[int], weights: Sequence[float] | None = None) -> float:
        """Of verifying so many tokens of each draft, relative to none; anything has to be worth `LEAST` more."""
        if not any(shares):
            return 1.0 + LEAST
        weights = weights or self.weights
        tokens = sum(w * (1.0 + sum(d[:n])) for d, w, n in zip(self.drafts, weights, shares, strict=True))
        dearer = self.seconds[int(self.copies * sum(shares))] / self.seconds[0] - 1.0
        return tokens / sum(weights) / (1.0 + (1.0 + MARGIN) * dearer)

    def best(self, weights: Sequence[float]) -> list[int]:
        """The shares of most goodput: of any number of tokens those that count most."""
        each = enumerate(zip(self.drafts, weights, strict=True))
        choices = [[0] * len(self.drafts)]
        for _, i in sorted(((w * p, i) for i, (draft, w) in each for p in draft), reverse=True):
            choices.append([n + (at == i) for at, n in enumerate(choices[-1])])
        return max(choices, key=lambda shares: self.goodput(shares, weights))
