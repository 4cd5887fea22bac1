"""What a training says of itself: of each micro-step, of all of them, and of what the weights were made with."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from typing import Literal

from drafter_online.objective import Acceptance


@dataclass(frozen=True)
class StepReport:
    """What a micro-step did. `skipped`: why it changed nothing, None when it did its work."""

    micro_step: int
    step: int  # optimiser steps so far
    tokens: int
    terms: dict[str, float]
    acceptance: Acceptance
    grad_norm: float | None = None  # of an optimiser step
    skipped: Literal["empty", "preempted", "not_finite", "out_of_memory"] | None = None


@dataclass
class TrainerCounts:
    """Since the training began, over restarts."""

    micro_steps: int = 0
    steps: int = 0
    tokens: int = 0
    preempted: int = 0
    not_finite: int = 0
    restored: int = 0
    out_of_memory: int = 0
    failed: int = 0


def provenance() -> dict[str, str]:
    """Versions of what the weights were made with."""
    found = {}
    for name in ("rollspec", "speculators", "torch", "transformers", "safetensors"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
