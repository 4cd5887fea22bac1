"""What of the drafter's training failed: counted with the engine's faults, said once; training goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollspec.once import Once

if TYPE_CHECKING:
    from rollspec.engine.vllm.proposer import VllmProposer


class TrainingFaults:
    """Of one worker. `what` reads before "the drafter's training failed": saving, resuming, publishing."""

    def __init__(self, bridge: VllmProposer) -> None:
        self._bridge = bridge
        self._once = Once()

    def __call__(self, what: str, cause: str) -> None:
        """Count it, and say the first of its kind."""
        self._bridge.count(f"drafter training, {what}: {cause}")
        self._once(what, "rollspec: %s the drafter's training failed and is left out (%s).", what, cause)
