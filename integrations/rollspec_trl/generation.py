"""Hooks on TRL's `VLLMGeneration`, through which all but one of its trainers generate.

TRL's own code runs unchanged; what rollspec adds is caught, logged once, counted and left out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from rollspec.engine.vllm.hooks.base import on_import
from rollspec_trl import options
from rollspec_trl.engines import Colocated
from rollspec_trl.state import State, wrap_all

logger = logging.getLogger("rollspec")


def register() -> None:
    """Hook the class where it is, or will be, imported."""
    on_import("trl.generation.vllm_generation", install)


def install(module: ModuleType) -> None:
    """Wrap the methods of `VLLMGeneration` (trl/generation/vllm_generation.py)."""
    hooks = {"_init_vllm": _init, "sync_weights": _sync, "generate": _generate}
    wrap_all(module.VLLMGeneration, hooks, "policy versions stay 0")


def _init(original: Callable[..., Any], self: Any) -> Any:
    with options.for_engine(self):
        out = original(self)
    state = State.of(self)
    with state.faults.left_out("connecting"):
        state.connect(self)
    return out


def _sync(original: Callable[..., Any], self: Any) -> Any:
    out = original(self)
    state = State.of(self)
    with state.faults.left_out("policy version"):
        _on_sync(state)
    return out


def _on_sync(state: State) -> None:
    """The engine has new weights: a policy version begins. With several ranks each announces it to its own engine."""
    version = state.syncs if state.step is None else state.step()
    state.syncs += 1
    if state.engine is None:
        return
    if version != state.version:  # with sleep mode TRL sends the same weights again
        state.engine.call("set_version", {"version": version})
        state.version = version
    if state.resume is not None:
        folder, state.resume = state.resume, None
        answer = state.engine.call("load", {"dir": str(folder)})
        logger.info("rollspec: history of the checkpoint %s: %s", folder, answer)


def _generate(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    began = time.perf_counter()
    out = original(self, *args, **kwargs)
    state = State.of(self)
    state.generation_seconds += time.perf_counter() - began
    if state.step is not None:
        prompts = kwargs["prompts"] if "prompts" in kwargs else args[0]
        state.turns.append((prompts, out[1]))
    if isinstance(state.engine, Colocated) and options.config().drafter.mode == "idle":
        # The machine is the trainer's until the engine computes again.
        with state.faults.left_out("drafter training"):
            state.engine.call("updating", {"on": True})
    return out
