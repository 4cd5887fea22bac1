"""One version on its way into an engine, and what runs there: data without behaviour."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from drafter_online.lifecycle import Event, Life, State
from rollspec.engine.vllm.swap.payload import Given, SwapRefusedError, number_of


@dataclass(frozen=True, slots=True)
class Running:
    """The weights that the engine drafts with."""

    version: int = 0
    since: int = 0  # newest policy version that they were trained on, or under which they came
    tensors: dict[str, torch.Tensor] | None = None  # by checkpoint name, on the CPU; None: as the engine was started
    store: Path | None = None  # of versions, that they are from


@dataclass(frozen=True, slots=True)
class Staged:
    """Weights that the second copy of the drafter holds."""

    given: Given
    change: float  # |new - old| / |old| over all weights
    seconds: float
    marks: list[float]  # fingerprint


@dataclass(slots=True, eq=False)
class Swap:
    """A version that was asked for; `payload`: see `Swapper.request`. `offered`: by another thread, not by hand."""

    payload: Mapping[str, Any]
    offered: bool = False
    replaces: bool = False  # it took the place of a staged one, and none takes its own
    wait: bool = field(init=False)  # whoever asked waits for the swap
    life: Life = field(init=False)
    thread: threading.Thread | None = None  # that stages it
    staged: Staged | None = None
    error: SwapRefusedError | None = None  # why it could not be staged, on this rank

    def __post_init__(self) -> None:
        self.wait = bool(self.payload.get("wait"))
        self.life = Life(number_of(self.payload))
        self.life.apply(Event.OFFER)

    @property
    def canary(self) -> bool:
        """Whether it is to be judged before it is promoted."""
        return bool(self.payload.get("canary", True))

    @property
    def preparing(self) -> bool:
        """Whether it is being staged, or waits staged for a step."""
        return self.life.state in (State.STAGING, State.STAGED)

    @property
    def replaceable(self) -> bool:
        """Whether a newer offer may take its place once it is staged."""
        return self.offered and self.canary and not self.replaces

    @property
    def done(self) -> bool:
        """Whether staging has ended, well or not."""
        return self.thread is None or not self.thread.is_alive()

    def notice(self) -> None:
        """Take the transition that its thread has made possible. On the engine's thread."""
        if self.life.state is State.STAGING and self.done and self.staged is not None:
            self.life.apply(Event.READY)
