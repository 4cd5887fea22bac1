"""The settings that an engine was built with: rollspec's configuration inside vLLM's, which every process can read."""

from __future__ import annotations

from typing import Any

from rollspec.config import RollspecConfig

KEY = "rollspec"
"""Of `additional_config`: the configuration as a mapping, or {"off": why there is none}."""


def is_on(vllm_config: Any) -> bool:
    """Whether rollspec is on in an engine; cheap enough to ask for every request of every step."""
    given = (getattr(vllm_config, "additional_config", None) or {}).get(KEY)
    return isinstance(given, dict) and "off" not in given


def engine_config(vllm_config: Any) -> RollspecConfig | None:
    """The configuration an engine was built with, or None where rollspec is off in it. Parses: once per object."""
    return RollspecConfig.from_dict(vllm_config.additional_config[KEY]) if is_on(vllm_config) else None
