"""The settings that an engine was built with: rollspec's configuration inside vLLM's, which every process can read."""

from __future__ import annotations

from typing import Any

from rollspec.config import RollspecConfig

KEY = "rollspec"
"""Of `additional_config`: the configuration as a mapping, or {"off": why there is none}."""


def engine_config(vllm_config: Any) -> RollspecConfig | None:
    """The configuration an engine was built with, or None where rollspec is off in it."""
    given = (getattr(vllm_config, "additional_config", None) or {}).get(KEY)
    if not isinstance(given, dict) or "off" in given:
        return None
    return RollspecConfig.from_dict(given)
