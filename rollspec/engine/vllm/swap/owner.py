"""What a swap needs of the engine it happens in, and nothing else of it."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from drafter_online.canary import Vector


class KnownAcceptance(Protocol):
    """What the router knows of the running weights' acceptance."""

    @property
    def measured(self) -> Vector:
        """Acceptance rate per draft position [K], of what was seen alone."""

    def state(self) -> dict[str, list[float]]:
        """What `SwapOwner.swapped` takes to know it again."""


class SwapOwner(Protocol):
    """One worker's engine. Everything is called on the engine's own thread, but for what staging reads."""

    @property
    def vllm_config(self) -> Any:
        """vLLM's configuration of this worker."""

    @property
    def draft_model(self) -> torch.nn.Module:
        """The draft model that runs. Its storage stays where it is: CUDA graphs hold its addresses."""

    @property
    def target_model(self) -> torch.nn.Module:
        """The target. vLLM shares its embedding and LM head with the draft model by reference."""

    @property
    def draft_folder(self) -> str:
        """Folder, or name on the hub, of the weights that the engine was started with."""

    @property
    def base(self) -> str:
        """The target's architecture, sizes and vocabulary: `drafter_online.head.base_of`."""

    @property
    def device(self) -> torch.device:
        """Where the draft model is."""

    @property
    def asleep(self) -> bool:
        """Whether the engine's memory is taken away (sleep mode)."""

    @property
    def policy_version(self) -> int:
        """The policy that is sampled from."""

    @property
    def acceptance(self) -> KnownAcceptance:
        """Of the weights that run."""

    def second_model(self) -> torch.nn.Module:
        """A second draft model as vLLM's loader makes it."""

    def rewind(self) -> int:
        """Have the draft model's KV computed anew from the kept hidden states; returns the positions that concerns."""

    def swapped(self, version: int, acceptance: dict[str, list[float]] | None = None) -> None:
        """Other weights run from now on; `acceptance`: what is known of theirs."""

    def canary(self, running: bool) -> None:
        """A canary begins or has ended: while it runs, drafts of the new weights must be scored."""

    def record_fault(self, cause: str) -> None:
        """Count what went wrong."""
