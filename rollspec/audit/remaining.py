"""How long an audit still takes: as much longer than guessed as it has taken so far."""

from __future__ import annotations

import time

ENGINE = 30.0  # seconds in which an engine starts and answers greedily
TOKEN = 3e-3  # seconds to sample one
LOADING = 6.0  # seconds to load the reference model
JUDGED = 1.5  # the target's probabilities of a token take so many times as long as sampling it


class Remaining:
    """Of an audit of `tokens` tokens. Times are seconds of one clock; stages come in the order of `run_audit`."""

    def __init__(self, tokens: int) -> None:
        sampling = TOKEN * tokens  # (until it first reports, from then on) of each stage
        self._guess = [(ENGINE, sampling), (ENGINE, 0.0), (0.0, LOADING), (0.0, JUDGED * sampling)]
        self._stage, self._began = -1, 0.0
        self._at, self._left = 0.0, 0.0

    def begin(self, now: float) -> None:
        """The next stage begins."""
        self._began = self._began if self._stage >= 0 else now
        self._stage += 1
        self.report(0, 1, now)

    def report(self, done: int, total: int, now: float) -> None:
        """The stage has done so much."""
        start, work = self._guess[self._stage]
        spent = sum(map(sum, self._guess[: self._stage])) + (start + work * done / total if done else 0.0)
        slower = (now - self._began) / spent if spent else 1.0
        self._at, self._left = now, slower * (sum(map(sum, self._guess)) - spent)

    def left(self, now: float) -> float:
        """Seconds that are left, at least 1."""
        return max(1.0, self._left - (now - self._at))

    def __str__(self) -> str:
        seconds = self.left(time.monotonic())
        return f"about {seconds / 60:.0f} min left" if seconds > 90 else f"about {seconds:.0f} s left"
