"""verl's fully asynchronous recipe (verl/experimental/fully_async_policy), which has no step that `trainer.py` could
hook: rewards, measurements and checkpoints in the actor that rolls out.

    VERL_USE_EXTERNAL_MODULES=rollspec_verl python -m verl.experimental.fully_async_policy.fully_async_main ...

The recipe builds its servers before anything imports `model.external_lib`, and Ray sends an actor's class by value from
the process that creates it: so verl has to import this package in every process, which that variable makes it do where
it is set (on a cluster that is up already: in the job's runtime environment).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rollspec.engine.vllm.hooks.base import wrap_all
from rollspec.errors import ConfigError
from rollspec_verl import options, servers, trainer
from rollspec_verl.rollouts import Rollouts


def install(module: ModuleType) -> None:
    """Wrap methods of `FullyAsyncRollouter` (fully_async_rollouter.py:333 of verl 0.9.1). Idempotent; all or none."""
    metadata = getattr(getattr(module, "FullyAsyncRollouter", None), "__ray_metadata__", None)
    cls = getattr(metadata, "modified_class", None)
    wrap_all(cls, "verl's FullyAsyncRollouter", HOOKS, "nothing is measured")


async def _init_workers(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Before any server exists: the settings in full, as `trainer.py` writes them."""
    rollout = self.config.actor_rollout_ref.rollout
    options.settle(rollout)
    config = options.read(rollout)
    if config.enabled and config.reuse.mode == "lenient":
        raise ConfigError(
            "rollspec: reuse.mode = lenient counts epochs by the trainer's steps, which the fully asynchronous recipe "
            "does not have; leave it out, or use verl.trainer.main_ppo."
        )
    if config.enabled and config.drafter.mode == "policy":
        raise ConfigError(
            "rollspec: drafter.mode = policy reads the trainer's log-prob pass, which is not hooked in the fully "
            "asynchronous recipe; take dedicated, or use verl.trainer.main_ppo."
        )
    return await original(self, *args, **kwargs)


async def _sampled(original: Callable[..., Any], self: Any, rollout_sample: Any, *args: Any, **kwargs: Any) -> Any:
    """A prompt's responses are there and scored."""
    out = await original(self, rollout_sample, *args, **kwargs)
    state = trainer.VerlState.of(self)
    with state.faults.left_out("rollouts"):
        trainer.take(self, state, Rollouts.of(rollout_sample.full_batch))
    return out


async def _synced(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """The engines have new weights: what was measured since the last ones goes to verl's logger with what the recipe
    itself measured.
    """
    out = await original(self, *args, **kwargs)
    state = trainer.VerlState.of(self)
    with state.faults.left_out("collecting metrics"):
        # The actor's own steps count prompts.
        step = max((last for r in state.rollouts for _, last in r.versions if last is not None), default=0)
        out |= await asyncio.to_thread(trainer.metrics, self, state, int(step))
    return out


async def _save_checkpoint(
    original: Callable[..., Any], self: Any, local_global_step_folder: str, *args: Any, **kwargs: Any
) -> Any:
    out = await original(self, local_global_step_folder, *args, **kwargs)
    state = trainer.VerlState.of(self)
    with state.faults.left_out("save"):
        folder = Path(local_global_step_folder).resolve()
        await asyncio.to_thread(trainer.save, self, state, folder)
        await asyncio.to_thread(trainer.prune, state, folder)
    return out


def _load_checkpoint(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    out = original(self, *args, **kwargs)
    state = trainer.VerlState.of(self)
    with state.faults.left_out("load"):
        if (found := _resumed_from(self.config.trainer)) is not None:
            trainer.load(self, state, Path(found).resolve())
    return out


def _resumed_from(config: Any) -> str | None:
    """The checkpoint's folder, as verl finds it; None where the job begins anew."""
    from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

    if config.resume_mode == "auto":
        found: str | None = find_latest_ckpt_path(os.path.abspath(config.default_local_dir))
        return found
    return str(config.resume_from_path) if config.resume_mode == "resume_path" else None


async def _fit(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return await original(self, *args, **kwargs)
    finally:
        with trainer.VerlState.of(self).faults.left_out("end"):
            await asyncio.to_thread(servers.tidy, self)


HOOKS = {
    "init_workers": _init_workers,
    "_process_single_sample_streaming": _sampled,
    "reset_staleness": _synced,
    "save_checkpoint": _save_checkpoint,
    "load_checkpoint": _load_checkpoint,
    "fit": _fit,
}
