"""Every tuning strategy by its name. It imports them all, so that they register; they know only `strategy.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollspec.tuning import bandits, hedge, profile, strategy  # noqa: F401 - all but strategy register themselves


def make(
    name: str, arms: Sequence[strategy.Arm], options: Mapping[str, Any] | None = None, seed: int = 0
) -> strategy.Strategy:
    """The strategy called `name`."""
    return strategy.REGISTRY[name](arms, options, seed)
