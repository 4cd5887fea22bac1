"""How long the running micro-step has been running, and whether that is a hang.

The trainer's thread wraps each micro-step; any other thread may ask. Nothing here can end a step that hangs: it makes
one visible.

    watch = StepWatch()
    with watch:
        trainer.micro_step(...)
    watch.age, watch.hangs          # on another thread
"""

from __future__ import annotations

import time
from collections.abc import Callable

LEAST_SECONDS = 120.0
"""No step is said to hang before this: the first one loads libraries and may compile."""

TIMES = 20.0
"""A step hangs once it takes so many times the mean of those before it."""


class StepWatch:
    """Of one training thread.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began: float | None = None
        self._steps, self._seconds = 0, 0.0

    def __enter__(self) -> StepWatch:
        self._began = self._clock()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._began is not None:
            self._steps += 1
            self._seconds += self._clock() - self._began
        self._began = None

    @property
    def age(self) -> float:
        """Seconds that the running step has taken so far; 0 while none runs."""
        began = self._began  # another thread may end the step meanwhile
        return 0.0 if began is None else max(0.0, self._clock() - began)

    @property
    def bound(self) -> float:
        """Seconds after which a step hangs."""
        return max(LEAST_SECONDS, TIMES * self._seconds / max(1, self._steps))

    @property
    def hangs(self) -> str | None:
        """One sentence without its full stop, None while all is well."""
        age = self.age
        if age <= self.bound:
            return None
        return f"a training step of the drafter has been running for {age:.0f} s, more than {self.bound:.0f} s"
