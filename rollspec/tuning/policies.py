"""Every tuning policy by its name. It imports them all, so that they register; they know only `policy.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollspec.tuning import bandits, hedge, policy, profile  # noqa: F401 - all but policy register themselves


def make(
    name: str, arms: Sequence[policy.Arm], options: Mapping[str, Any] | None = None, seed: int = 0
) -> policy.Policy:
    """The policy called `name`."""
    return policy.REGISTRY[name](arms, options, seed)
