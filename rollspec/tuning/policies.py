"""Every tuning policy by its name. It imports them all, so that they register; they know only `policy.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollspec.errors import ConfigError
from rollspec.tuning import bandits, hedge, policy, profile  # noqa: F401 - all but policy register themselves


def make(
    name: str, arms: Sequence[policy.Arm], options: Mapping[str, Any] | None = None, seed: int = 0
) -> policy.Policy:
    """The policy called `name`.

    Raises:
        ConfigError: there is no such policy, or its options are wrong.
    """
    known = policy.REGISTRY
    if name not in known:
        raise ConfigError(f"rollspec: tuning.policy = {name!r} does not exist; choose one of {', '.join(known)}.")
    return known[name](arms, options, seed)
