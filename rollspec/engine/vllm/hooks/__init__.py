"""Every change that rollspec makes to vLLM, in one list; it is the order in which they are made.

To add one: a hook in its place of `table.py` (a `Patch` of a fault of vLLM's CPU build in `cpu.py`), and what runs in
the target's place where it belongs: in `plugin.BEHAVIOUR` for a `Hook`, by `put` in the module that owns it for a
`RunnerHook`. Then `python scripts/check_vllm.py --record` and `python -m scripts.generate`.
Modules outside this folder assign to no object of vLLM's (tests/unit/rollspec/engine/test_hooks.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from rollspec.engine.vllm.compat import vllm_version
from rollspec.engine.vllm.hooks import table
from rollspec.engine.vllm.hooks.base import Around, Hook, Patch, RunnerHook, keep
from rollspec.engine.vllm.hooks.cpu import CpuIdleWait, CpuKernelRegistry, CpuRepackWeights

PATCHES: tuple[Patch, ...] = (CpuRepackWeights, CpuIdleWait, CpuKernelRegistry)
"""Before a model is loaded."""

HOOKS: tuple[Hook, ...] = (*PATCHES, *(h for h in vars(table).values() if isinstance(h, Hook)))

ENV_PATCHES = "ROLLSPEC_PATCHES"

__all__ = [
    "ENV_PATCHES", "HOOKS", "PATCHES", "Around", "CpuIdleWait", "CpuRepackWeights", "Hook", "Patch",
    "RunnerHook", "install", "install_patches", "keep", "missing", "wanted_by_environment",
]  # fmt: skip

_patched: list[str] | None = None


def install(behaviour: Mapping[Hook, Around]) -> list[str]:
    """Apply these hooks in the order of `HOOKS`; returns the names of those that the installed version gets."""
    version = vllm_version()
    return [h.name for h in HOOKS if h in behaviour and h.install(version, behaviour[h])]


def wanted_by_environment() -> bool | None:
    """`ROLLSPEC_PATCHES=cpu` asks for the patches in any engine, `none` forbids them, unset leaves it to rollspec.

    `cpu` is for baselines: an engine without rollspec that must be correct all the same.
    """
    value = os.environ.get(ENV_PATCHES, "").strip().lower()
    return {"cpu": True, "none": False}.get(value)


def install_patches() -> None:
    """Apply all needed patches, once per process."""
    global _patched
    if _patched is None:
        version = vllm_version()
        _patched = [p.name for p in PATCHES if p.apply(version)]


def missing() -> list[str]:
    """Patches that correct outputs need and this process does not have: with one missing, speculation must stay off."""
    have = _patched or ()
    return [p.name for p in PATCHES if p.correctness and p.name not in have and p.needed()]
