"""How long an audit still takes: by guesses at first, then by what its stages have taken."""

from __future__ import annotations

ENGINE = 30.0  # seconds of the first stage, in which an engine starts and answers greedily
TOKEN = 3e-3  # seconds to sample one
LOADING = 0.2  # of the first stage: the reference model is loaded
JUDGED = 1.5  # the target's probabilities of a token take so many times as long as sampling it


class Remaining:
    """Of an audit of `tokens` tokens. Times are seconds of one clock; stages come in the order of `run_audit`."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._stage, self._began = -1, 0.0
        self._engine, self._rate = ENGINE, TOKEN
        self._latest: tuple[float, float] | None = None  # when the stage reported, and its seconds left then

    def begin(self, now: float) -> None:
        """The next stage begins."""
        if self._stage == 0:
            self._rate *= (now - self._began) / self._engine  # a slow start is of a slow machine or a large model
            self._engine = now - self._began
        self._stage, self._began, self._latest = self._stage + 1, now, None

    def report(self, done: int, total: int, now: float) -> None:
        """The stage has done so much."""
        if not done or self._stage not in (1, 3):
            return
        spent = now - self._began - (self._engine if self._stage == 1 else 0.0)
        rate = max(0.0, spent) / done or self._rate
        if self._stage == 1:
            self._rate = rate
        self._latest = now, rate * max(0, total - done)

    def left(self, now: float) -> float:
        """Seconds that are left, at least 1."""
        sampling, judging = self._rate * self._tokens, JUDGED * self._rate * self._tokens
        # The last one is the control, which an audit has that fails.
        stages = (self._engine, self._engine + sampling, LOADING * self._engine, judging, sampling + judging)
        at = min(max(self._stage, 0), 4)
        when, rest = self._latest or (self._began, stages[at])
        return max(1.0, rest - (now - when)) + sum(stages[at + 1 : 4])
