"""What a swap needs of the engine it happens in, and nothing else of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from rollspec.proposal.router import HeadAcceptance


class SwapOwner(Protocol):
    """One worker's engine. Everything is called on the engine's own thread, but for what staging reads.

    Attributes:
        draft_folder: folder, or name on the hub, of the weights that the engine was started with.
        asleep: whether the engine's memory is released (sleep mode).
    """

    draft_folder: str
    asleep: bool

    @property
    def acceptance(self) -> HeadAcceptance:
        """What is known of that of the weights that run."""

    @property
    def base(self) -> str:
        """The target's architecture, sizes and vocabulary: `drafter_online.architecture.base_of`."""

    @property
    def policy_version(self) -> int:
        """The policy that is sampled from."""

    def rewind(self) -> int:
        """Have the draft model's KV computed anew from the kept hidden states; returns the positions that concerns."""

    def swapped(self, version: int, known: Mapping[str, Sequence[float]] | None = None) -> None:
        """Other weights run from now on; `known`: of their acceptance."""

    def canary(self, running: bool) -> None:
        """A canary begins or has ended: while it runs, drafts of the new weights must be scored."""

    def record_fault(self, cause: str) -> None:
        """Count what went wrong."""


class Weights(Protocol):
    """The draft model's weights in one worker: those that run, and a second copy of it that new ones are loaded into.

    Tensors go by checkpoint name. `load` may run on another thread than `exchange`; never both at once.

    Attributes:
        marks: what the fingerprint of the running weights is meant to be.
    """

    marks: list[float]

    def original(self) -> dict[str, torch.Tensor]:
        """What the engine was started with."""

    def strip(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Without what is the target's own, which must never be written."""

    def intact(self) -> bool:
        """Whether the running weights are what was put there."""

    def build(self) -> None:
        """Make the second copy, once."""

    def load(self, tensors: Mapping[str, torch.Tensor]) -> list[float]:
        """Load into the second copy; the fingerprint that the running weights have after `exchange`."""

    def exchange(self, marks: list[float] | None = None) -> None:
        """The second copy's weights run from now on, in the storage of the first; `marks`: their fingerprint."""
