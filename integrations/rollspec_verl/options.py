"""Reads rollspec's options from verl's rollout configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollspec.config import RollspecConfig


def read(rollout: Any) -> RollspecConfig:
    """The configuration under `rollout.custom.rollspec`; the default preset where there is none.

    `rollout.custom` is a free dict that verl declares for such use (verl/workers/config/rollout.py). `rollout` may be
    verl's dataclass or an OmegaConf node.

    Raises:
        ConfigError: a key or value that cannot be used; the job then fails at start with that sentence.
    """
    custom = _plain(rollout.get("custom", None) or {})
    given = custom.get("rollspec")
    if given is None or given == {}:
        return RollspecConfig.load("default")
    if isinstance(given, Mapping) and "preset" not in given:
        given = {"preset": "default", **given}
    return RollspecConfig.load(given)


def _plain(node: Any) -> dict[str, Any]:
    from omegaconf import DictConfig, OmegaConf

    if isinstance(node, DictConfig):
        return OmegaConf.to_container(node, resolve=True)  # type: ignore[return-value]
    return {k: OmegaConf.to_container(v, resolve=True) if OmegaConf.is_config(v) else v for k, v in dict(node).items()}
