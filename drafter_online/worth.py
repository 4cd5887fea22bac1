"""Whether what was learned is worth a version: the steps that its acceptance saves against what taking it up costs.

Acceptance is that of the training windows, which are of the present target and traffic. The lowest since the last
version is what that version reaches on them: where the policy moves or the traffic shifts it falls, and training raises
it again. With acceptance length a before and b now, a token takes 1/a steps and 1/b, so of `tokens` to come
tokens * (1 - a/b) are free of cost. Publishing when it pays is SpecBlock's rule; theirs is on a bandit's reward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sized

COST = 8.0
"""Tokens that could be generated in the time of a swap and of a canary's first drafts."""

SMOOTHING = 0.1
"""Weight of the latest micro-step's windows."""

PATIENCE = 10
"""Times the earliest moment after which a version is published whatever it seems to give."""


class Worth:
    """Follows acceptance from one version to the next."""

    def __init__(self) -> None:
        self._now: float | None = None
        self._least = 0.0

    def observe(self, length: float) -> None:
        """Acceptance length of a micro-step's windows."""
        if self._now is None:
            self._now = self._least = length
        self._now += SMOOTHING * (length - self._now)
        self._least = min(self._least, self._now)

    def published(self) -> None:
        """The present weights are the engine's."""
        self._least = self._now or 0.0

    def saves(self, tokens: float) -> float:
        """Of `tokens` to come, those that the present weights would give without a step."""
        return tokens * (1.0 - self._least / self._now) if self._now else 0.0

    def pays(self, samples: Iterable[Sized], steps: int, earliest: int) -> bool:
        """Whether to publish now.

        Args:
            samples: of late; as many tokens are expected to come.
            steps: since the last version.
            earliest: steps before which nothing is published.
        """
        if steps < earliest:
            return False
        return steps >= PATIENCE * earliest or self.saves(sum(map(len, samples))) > COST
