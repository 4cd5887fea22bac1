"""OpenRLHF's vLLM actors with rollspec's engine configuration, and a bounded way to call their workers.

OpenRLHF sets `worker_extension_cls` itself; rollspec's worker method is on vLLM's worker base class, so both are there.
"""

from __future__ import annotations

import asyncio
import logging
from types import ModuleType
from typing import Any

from rollspec.config import RollspecConfig
from rollspec.engine.vllm.hooks.base import on_import

logger = logging.getLogger("rollspec")

CALL_SECONDS = 30.0
"""Bound on a call into an engine's workers."""

MOST_FAILURES = 3
"""Calls in a row without an answer after which an engine is left alone."""


def register(config: RollspecConfig) -> None:
    """Replace the actor's class where it is, or will be, imported: in the driver, which creates the engines."""
    on_import("openrlhf.trainer.ray.vllm_engine", lambda module: install(module, config))


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

    class RolloutRayActor(EngineCalls, base):  # type: ignore[misc,valid-type]
        async def __init__(self, *args: Any, **kwargs: Any) -> None:
            mine = config.of_replica(kwargs.get("seed", 0))  # each engine has a seed of its own
            kwargs["additional_config"] = {**(kwargs.get("additional_config") or {}), "rollspec": mine.to_dict()}
            await super().__init__(*args, **kwargs)

    return RolloutRayActor


class EngineCalls:
    """Operations of rollspec's worker, asked by the trainer's actor. `llm`: vLLM's `AsyncLLM`."""

    llm: Any
    rollspec_failures = 0

    async def rollspec_call(self, op: str, payload: dict[str, Any]) -> dict[str, Any]:
        """One operation on the worker that drafts (rollspec/engine/operations.py). Never raises, never hangs."""
        if self.rollspec_failures >= MOST_FAILURES:
            return {"error": "the engine does not answer"}
        try:
            answers = await asyncio.wait_for(self.llm.collective_rpc("rollspec", args=(op, payload)), CALL_SECONDS)
        except Exception as e:  # a dead engine is OpenRLHF's to report; rollspec must not add to it
            self.rollspec_failures += 1
            cause = f"{type(e).__name__}: {e}".rstrip(": ")
            logger.error("rollspec: a vLLM engine does not answer %r (%s).", op, cause)
            return {"error": cause}
        self.rollspec_failures = 0
        answer: dict[str, Any] = next((a for a in answers if a), {})
        if "error" in answer:
            logger.warning("%s", answer["error"])
        return answer
