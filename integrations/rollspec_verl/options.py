"""rollspec's options in verl's rollout configuration: resolved once, in the task runner, and data everywhere else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollspec.config import RollspecConfig, is_resolved, resolve


def settle(rollout: Any) -> None:
    """Resolve the options under `rollout.custom.rollspec`, an OmegaConf node, and write the settings back in full.

    Raises:
        ConfigError: a key or value that cannot be used; the job then ends at its start with that sentence.
    """
    from omegaconf import open_dict

    config = read(rollout)
    with open_dict(rollout):
        rollout.custom = {**_plain(rollout.get("custom", None) or {}), "rollspec": config.to_dict()}


def read(rollout: Any) -> RollspecConfig:
    """The settings under `rollout.custom.rollspec`; the default preset where there is nothing.

    `rollout.custom` is a free dict that verl declares for such use (verl/workers/config/rollout.py). `rollout` may be
    verl's dataclass or an OmegaConf node. Below a trainer that has no hook (trainer.use_v1=false) it holds what
    the user wrote, and every process resolves that for itself.

    Raises:
        ConfigError: a key or value that cannot be used.
    """
    given = _plain(rollout.get("custom", None) or {}).get("rollspec")
    if is_resolved(given):
        return RollspecConfig.from_dict(given)
    if isinstance(given, Mapping) and "preset" not in given:
        given = {"preset": "default", **given}
    return resolve(given or "default")


def _plain(node: Any) -> dict[str, Any]:
    from omegaconf import DictConfig, OmegaConf

    if isinstance(node, DictConfig):
        return OmegaConf.to_container(node, resolve=True)  # type: ignore[return-value]
    return {k: OmegaConf.to_container(v, resolve=True) if OmegaConf.is_config(v) else v for k, v in dict(node).items()}
