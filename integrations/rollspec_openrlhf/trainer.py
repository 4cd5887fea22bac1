"""The trainer's actor: what the engines counted goes into the step's `status`, hence into OpenRLHF's own loggers.

Its class is wrapped in the driver and travels to the actor with it. Policy versions need no hook: OpenRLHF loads
weights parameter by parameter, and the engine takes the first step after that as a new version
(rollspec/engine/policy.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

from rollspec.engine.calls import collect
from rollspec.engine.vllm.hooks.base import wrap
from rollspec.telemetry.faults import Faults
from rollspec.telemetry.rollouts import engine_metrics
from rollspec.telemetry.wandb_run import WandbWatch

logger = logging.getLogger("rollspec")


def install(module: ModuleType, name: str) -> None:
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
