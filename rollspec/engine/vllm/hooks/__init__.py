"""Every change that rollspec makes to vLLM, in one list; it is the order in which they are made.

To add one: a class in the file of its place (`engine.py`, `worker.py`, `runner_v2.py`, ...), its entry in `HOOKS`, and
what runs in the target's place where it belongs: in `plugin.BEHAVIOUR` for a `Hook`, by `put` in the module that owns
it for a `RunnerHook`. Then `python scripts/check_vllm.py --record` and `python -m scripts.generate`.
Modules outside this folder assign to no object of vLLM's (tests/unit/rollspec/engine/test_hooks.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from rollspec.engine.vllm.hooks import engine, runner_v2, worker
from rollspec.engine.vllm.hooks.base import Around, Hook, Patch, RunnerHook, keep, on_import
from rollspec.engine.vllm.hooks.cpu_kernels import CpuKernelRegistry
from rollspec.engine.vllm.hooks.cpu_wait import CpuIdleWait
from rollspec.engine.vllm.hooks.cpu_weights import CpuRepackWeights

HOOKS: tuple[type[Hook], ...] = (
    # Faults of vLLM, before a model is loaded.
    CpuRepackWeights,
    CpuIdleWait,
    CpuKernelRegistry,
    # In every process that loads vLLM's plugins; without effect in engines that rollspec is not on in.
    engine.CreateEngineConfig,
    worker.InitDevice,
    worker.InitializeFromConfig,
    worker.WorkerCall,
    engine.AddRequest,
    engine.OutputHandler,
    engine.ReserveSlots,
    engine.UpdateFromOutput,
    engine.DraftStatistics,
    # In a worker, before its model runner is made.
    runner_v2.InitSpeculator,
    runner_v2.LoadTarget,
    runner_v2.GiveStates,
    # When the model is loaded, where there are specialists.
    runner_v2.LoadHead,
    runner_v2.MakeHead,
    runner_v2.HeadModel,
    # On a model, a worker and a model runner that are ready, in this order; the last one is the first to see a step.
    worker.LoadWeights,
    worker.PackedLinear,
    worker.WorkerSleep,
    worker.WorkerWakeUp,
    runner_v2.BeginStep,
    runner_v2.EndStep,
    runner_v2.GiveDrafts,
    runner_v2.SampleStep,
    runner_v2.Propose,
    runner_v2.GiveSeed,
    runner_v2.NoFlashInfer,
    runner_v2.Verify,
    runner_v2.ProcessLogits,
    runner_v2.ScorePrompts,
    runner_v2.SampleDraft,
    runner_v2.DraftSteps,
)

PATCHES: tuple[type[Patch], ...] = tuple(h for h in HOOKS if issubclass(h, Patch))

ENV_PATCHES = "ROLLSPEC_PATCHES"

__all__ = [
    "ENV_PATCHES", "HOOKS", "PATCHES", "Around", "CpuIdleWait", "CpuRepackWeights", "Hook", "Patch",
    "RunnerHook", "install", "install_patches", "keep", "missing", "on_import", "wanted_by_environment",
]  # fmt: skip

_patched: list[str] | None = None


def install(behaviour: Mapping[type[Hook], Around]) -> list[str]:
    """Apply these hooks in the order of `HOOKS`; returns the names of those that the installed version gets."""
    from rollspec.engine.vllm.compat import vllm_version

    version = vllm_version()
    return [h.name for h in HOOKS if h in behaviour and h.install(version, behaviour[h])]


def wanted_by_environment() -> bool | None:
    """`ROLLSPEC_PATCHES=cpu` asks for the patches in any engine, `none` forbids them, unset leaves it to rollspec.

    `cpu` is for baselines: an engine without rollspec that must be correct all the same.
    """
    value = os.environ.get(ENV_PATCHES, "").strip().lower()
    return {"cpu": True, "none": False}.get(value)


def install_patches() -> list[str]:
    """Apply all needed patches once per process; returns their names."""
    global _patched
    if _patched is None:
        from rollspec.engine.vllm.compat import vllm_version

        version = vllm_version()
        _patched = [p.name for p in PATCHES if p.install(version)]
    return _patched


def missing() -> list[str]:
    """Patches that correct outputs need and this process does not have: with one missing, speculation must stay off."""
    have = _patched or ()
    return [p.name for p in PATCHES if p.correctness and p.name not in have and p.needed()]
