"""The trainer's actor: what the engines counted goes into the step's `status`, hence into OpenRLHF's own loggers.

Its class is wrapped in the driver and travels to the actor with it. Policy versions need no hook: OpenRLHF loads
weights parameter by parameter, and the engine takes the first step after that as a new version
(rollspec/engine/policy.py).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from rollspec.engine.calls import collect
from rollspec.engine.vllm.hooks.base import on_import, wrap
from rollspec.telemetry.faults import Faults
from rollspec.telemetry.rollouts import engine_metrics
from rollspec.telemetry.wandb_run import WandbWatch

logger = logging.getLogger("rollspec")

TRAINERS = (("openrlhf.trainer.ppo_trainer", "PPOTrainer"), ("openrlhf.trainer.ppo_trainer_async", "TrainingActor"))


def register() -> None:
    """Wrap the trainers where they are, or will be, imported: in the driver."""
    for module, name in TRAINERS:
        on_import(module, functools.partial(install, name=name))


def install(module: ModuleType, name: str) -> None:
    """Wrap `train_step` of the actor class `module.name` (openrlhf/trainer/ppo_trainer.py). Idempotent."""
    try:
        wrap(getattr(module, name).__ray_metadata__.modified_class, "train_step", _train_step)
    except AttributeError as e:
        logger.error("rollspec: OpenRLHF's %s is not as expected (%s), so nothing is measured.", name, e)


def _train_step(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    status, step = original(trainer, *args, **kwargs)
    add_metrics(trainer, status)
    return status, step


def add_metrics(trainer: Any, status: dict[str, Any]) -> None:
    """Add `rollspec/*` to a step's status. Never raises."""
    faults = trainer.__dict__.setdefault("_rollspec_faults", Faults())
    with faults.left_out("collecting metrics"):
        watch = trainer.__dict__.setdefault("_rollspec_watch", WandbWatch())
        answers = ask(trainer.vllm_engines or ())
        metrics = engine_metrics(answers, faults.drain())
        status.update(metrics)
        watch.observe(metrics)


def ask(engines: Sequence[Any], op: str = "stats") -> list[dict[str, Any]]:
    """The answer of every engine's actor."""
    return collect([engine.rollspec_call.remote(op, {}) for engine in engines])
