"""OpenRLHF's actors in Ray: vLLM's get rollspec's engine configuration and operations, and what they counted goes into
the step's `status` in the trainer's, hence into OpenRLHF's own loggers.

OpenRLHF sets `worker_extension_cls` itself; rollspec's worker method is on vLLM's worker base class, so both are there.
The trainer's class is wrapped in the driver and travels to the actor with it. Policy versions need no hook: OpenRLHF
loads weights parameter by parameter, and the engine takes the first step after that as a new version
(rollspec/engine/bridge.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

from rollspec.config import RollspecConfig
from rollspec.engine.calls import EngineCalls, collect
from rollspec.engine.vllm.hooks.base import wrap
from rollspec.telemetry.faults import Faults
from rollspec.telemetry.metrics import engine_metrics
from rollspec.telemetry.wandb_run import WandbWatch

logger = logging.getLogger("rollspec")


def install_engine(module: ModuleType, config: RollspecConfig) -> None:
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


def install_trainer(module: ModuleType, name: str) -> None:
    """Wrap `train_step` of the actor class `module.name` (openrlhf/trainer/ppo_trainer.py). Idempotent."""
    try:
        wrap(getattr(module, name).__ray_metadata__.modified_class, "train_step", _train_step)
    except AttributeError as e:
        logger.error("rollspec: OpenRLHF's %s is not as expected (%s), so nothing is measured.", name, e)


def _train_step(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Adds `rollspec/*` to the step's status."""
    status, step = original(trainer, *args, **kwargs)
    faults = trainer.__dict__.setdefault("_rollspec_faults", Faults())
    with faults.left_out("collecting metrics"):
        watch = trainer.__dict__.setdefault("_rollspec_watch", WandbWatch())
        answers = collect([engine.rollspec_call.remote("stats", {}) for engine in trainer.vllm_engines or ()])
        metrics = engine_metrics(answers, faults.drain())
        status.update(metrics)
        watch.observe(metrics)
    return status, step
