"""OpenRLHF's vLLM actors with rollspec's engine configuration, and its operations.

OpenRLHF sets `worker_extension_cls` itself; rollspec's worker method is on vLLM's worker base class, so both are there.
"""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

from rollspec.config import RollspecConfig
from rollspec.engine.calls import EngineCalls

logger = logging.getLogger("rollspec")


def install(module: ModuleType, config: RollspecConfig) -> None:
    """Put a subclass behind `RolloutRayActor` (openrlhf/trainer/ray/vllm_engine.py). Idempotent."""
    import ray

    try:
        base = module.RolloutRayActor.__ray_metadata__.modified_class.__ray_actor_class__
    except AttributeError as e:
        logger.error("rollspec: OpenRLHF's vLLM actor is not as expected (%s), so this job runs without rollspec.", e)
        return
    if not issubclass(base, EngineCalls):
        module.RolloutRayActor = ray.remote(subclass(base, config))  # type: ignore[attr-defined]


def subclass(base: type, config: RollspecConfig) -> type:
    """The actor's class with rollspec's part of the engine's `additional_config`."""

    class RolloutRayActor(EngineCalls, base):  # type: ignore[misc]
        async def __init__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[misc]  # Ray awaits it
            mine = config.of_replica(kwargs.get("seed", 0))  # each engine has a seed of its own
            kwargs["additional_config"] = {**(kwargs.get("additional_config") or {}), "rollspec": mine.to_dict()}
            await super().__init__(*args, **kwargs)

        async def rollspec_call(self, op: str, payload: dict[str, Any]) -> dict[str, Any]:
            return await self.rollspec_ask(self.llm, op, payload)

    return RolloutRayActor
