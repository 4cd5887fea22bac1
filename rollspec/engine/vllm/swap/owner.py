"""What a swap needs of the engine it happens in, and nothing else of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from rollspec.proposal.router import Acceptance


class SwapOwner(Protocol):
    """One worker's engine. Everything is called on the engine's own thread, but for what staging reads.

    Attributes:
        draft_model: that runs. Its storage stays where it is: CUDA graphs hold its addresses.
        target_model: shares its embedding and LM head with the draft model by reference.
        draft_folder: folder, or name on the hub, of the weights that the engine was started with.
        device: where the draft model is.
        asleep: whether the engine's memory is taken away (sleep mode).
        acceptance: what is known of that of the weights that run.
    """

    vllm_config: Any
    draft_model: torch.nn.Module
    target_model: torch.nn.Module
    draft_folder: str
    device: torch.device
    asleep: bool
    acceptance: Acceptance

    @property
    def base(self) -> str:
        """The target's architecture, sizes and vocabulary: `drafter_online.head.base_of`."""

    @property
    def policy_version(self) -> int:
        """The policy that is sampled from."""

    def second_model(self) -> torch.nn.Module:
        """A second draft model as vLLM's loader makes it."""

    def rewind(self) -> int:
        """Have the draft model's KV computed anew from the kept hidden states; returns the positions that concerns."""

    def swapped(self, version: int, known: Mapping[str, Sequence[float]] | None = None) -> None:
        """Other weights run from now on; `known`: of their acceptance."""

    def canary(self, running: bool) -> None:
        """A canary begins or has ended: while it runs, drafts of the new weights must be scored."""

    def record_fault(self, cause: str) -> None:
        """Count what went wrong."""
