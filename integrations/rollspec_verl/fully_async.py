"""verl's fully asynchronous recipe (verl/experimental/fully_async_policy), which has no step that `trainer.py` could
hook: rewards, measurements and checkpoints in the actor that rolls out.

    VERL_USE_EXTERNAL_MODULES=rollspec_verl python -m verl.experimental.fully_async_policy.fully_async_main ...

The recipe builds its servers before anything imports `model.external_lib`, and Ray sends an actor's class by value from
the process that creates it: so verl has to import this package in every process, which that variable makes it do.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rollspec.engine.vllm.hooks.base import on_import
from rollspec.errors import ConfigError
from rollspec_verl import options, servers, trainer
from rollspec_verl.rollouts import Rollouts

HOOKED = "_rollspec_hooked"


def register() -> None:
    """Hook the actor where its class is, or will be, imported."""
    on_import("verl.experimental.fully_async_policy.fully_async_rollouter", install)


def install(module: ModuleType) -> None:
    """Wrap the methods of `FullyAsyncRollouter` (fully_async_rollouter.py:333 of verl 0.9.1). Idempotent."""
    cls = module.FullyAsyncRollouter.__ray_metadata__.modified_class
    if HOOKED in vars(cls):
        return
    for name, around in HOOKS.items():
        setattr(cls, name, _wrapped(getattr(cls, name), around))
    setattr(cls, HOOKED, True)


def _wrapped(original: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    """Ray awaits a method only where its function is a coroutine's."""

    @functools.wraps(original)
    async def awaited(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await around(original, self, *args, **kwargs)

    @functools.wraps(original)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, *args, **kwargs)

    return awaited if inspect.iscoroutinefunction(original) else called


async def _init_workers(original: Callable[..., Any], self: Any) -> Any:
    """Before any server exists: the settings in full, as `trainer.py` writes them."""
    rollout = self.config.actor_rollout_ref.rollout
    options.settle(rollout)
    if options.read(rollout).reuse.mode == "lenient":
        raise ConfigError(
            "rollspec: reuse.mode = lenient counts epochs by the trainer's steps, which the fully asynchronous recipe "
            "does not have; leave it out, or use verl.trainer.main_ppo."
        )
    return await original(self)


async def _sampled(original: Callable[..., Any], self: Any, rollout_sample: Any) -> Any:
    """A prompt's responses are there and scored."""
    out = await original(self, rollout_sample)
    state = trainer.State.of(self)
    with state.faults.left_out("rollouts"):
        trainer.take(self, state, Rollouts.of(rollout_sample.full_batch))
    return out


async def _synced(original: Callable[..., Any], self: Any) -> Any:
    """The engines have new weights: what was measured since the last ones goes to verl's logger with what the recipe
    itself measured.
    """
    out = await original(self)
    state = trainer.State.of(self)
    with state.faults.left_out("collecting metrics"):
        out |= await asyncio.to_thread(trainer.metrics, self, state)
    return out


async def _save_checkpoint(original: Callable[..., Any], self: Any, folder: str) -> Any:
    out = await original(self, folder)
    state = trainer.State.of(self)
    with state.faults.left_out("save"):
        await asyncio.to_thread(trainer.save, self, state, Path(folder).resolve())
    return out


def _load_checkpoint(original: Callable[..., Any], self: Any) -> Any:
    out = original(self)
    state, config = trainer.State.of(self), self.config.trainer
    with state.faults.left_out("load"):
        if self.global_steps > 0:
            from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

            auto = config.resume_mode == "auto"
            found = (
                find_latest_ckpt_path(os.path.abspath(config.default_local_dir)) if auto else config.resume_from_path
            )
            trainer.load(self, state, Path(found).resolve())
    return out


async def _fit(original: Callable[..., Any], self: Any) -> Any:
    try:
        return await original(self)
    finally:
        with trainer.State.of(self).faults.left_out("end"):
            await asyncio.to_thread(servers.tidy, servers.replicas_of(self))


HOOKS = {
    "init_workers": _init_workers,
    "_process_single_sample_streaming": _sampled,
    "reset_staleness": _synced,
    "save_checkpoint": _save_checkpoint,
    "load_checkpoint": _load_checkpoint,
    "fit": _fit,
}
