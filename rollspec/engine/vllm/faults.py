"""What of the drafter's training failed: counted with the engine's faults, said once; training goes on."""

from __future__ import annotations

from collections.abc import Callable

from rollspec.log_once import LogOnce


class TrainingFaults:
    """Of one worker. `what` reads before "the drafter's training failed": saving, resuming, publishing.

    Args:
        count: counts a cause with the engine's faults.
    """

    def __init__(self, count: Callable[[str], None]) -> None:
        self._count = count
        self._once = LogOnce()

    def __call__(self, what: str, cause: str) -> None:
        """Count it, and say the first of its kind."""
        self._count(f"drafter training, {what}: {cause}")
        self._once(what, "rollspec: %s the drafter's training failed and is left out (%s).", what, cause)
