"""How much longer a request is expected to run, from how long its siblings and past epochs ran.

The long ones are what a rollout waits for (DAS arXiv:2511.13841), so their draft tokens may count for more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence

LIMITS = (0.5, 2.0)  # least and most that a token may count, relative to the batch's mean


def remaining(now: int, ended: Sequence[int], limit: int) -> float:
    """Expected tokens until the end of a response of `now` tokens so far and `limit` at most.

    The mean excess of those of `ended` (finished responses to the prompt, ascending) that were longer. Where none was,
    as much again as was emitted: a response that outlived all others is in a heavy tail.
    """
    if now >= limit:
        return 0.0
    longer = ended[bisect_right(ended, now) :]
    expected = sum(longer) / len(longer) - now if longer else float(max(now, 1))
    return min(expected, float(limit - now))


def weights(expected: Sequence[float], power: float) -> list[float]:
    """What a token of each request counts: (remaining / mean)^power within `LIMITS`, scaled to a mean of 1."""
    mean = sum(expected) / len(expected)
    if mean <= 0.0:
        return [1.0] * len(expected)
    low, high = LIMITS
    raw = [min(max((e / mean) ** power, low), high) for e in expected]
    scale = len(raw) / sum(raw)
    return [w * scale for w in raw]


class Refill:
    """Whether requests that end are replaced by waiting ones. While they are, every token counts the same; the long
    requests matter once nothing waits and the batch drains.
    """

    def __init__(self) -> None:
        self.rate = 0.0  # share of the latest ends that were followed by a beginning
        self._ends: deque[int] = deque()
        self._step = 0

    def step(self) -> None:
        """An engine step passed."""
        self._step += 1
        while self._ends and self._ends[0] < self._step - _REFILL_STEPS:
            self._ends.popleft()
            self.rate -= _REFILL_SMOOTH * self.rate

    def ended(self) -> None:
        """A request ended."""
        self._ends.append(self._step)

    def began(self) -> None:
        """A request began; it takes the place of one that ended lately, if there is one."""
        if self._ends:
            self._ends.popleft()
            self.rate += _REFILL_SMOOTH * (1.0 - self.rate)


_REFILL_STEPS = 32  # a waiting request has had its prompt computed by then
_REFILL_SMOOTH = 0.125
