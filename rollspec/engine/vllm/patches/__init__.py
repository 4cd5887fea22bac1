"""Every patch of vLLM, in one list. `install` applies the ones that are needed here."""

from __future__ import annotations

import os

from rollspec.engine.vllm.patches.base import Patch, on_import
from rollspec.engine.vllm.patches.cpu_sampler import CpuExpandBatch
from rollspec.engine.vllm.patches.cpu_wait import CpuIdleWait
from rollspec.engine.vllm.patches.cpu_weights import CpuRepackWeights

PATCHES: tuple[type[Patch], ...] = (CpuExpandBatch, CpuRepackWeights, CpuIdleWait)

ENV_PATCHES = "ROLLSPEC_PATCHES"

__all__ = ["ENV_PATCHES", "PATCHES", "CpuIdleWait", "Patch", "install", "missing", "on_import", "wanted_by_environment"]

_installed: list[str] | None = None


def wanted_by_environment() -> bool | None:
    """`ROLLSPEC_PATCHES=cpu` asks for the patches in any engine, `none` forbids them, unset leaves it to rollspec.

    `cpu` is for baselines: an engine without rollspec that must be correct all the same.
    """
    value = os.environ.get(ENV_PATCHES, "").strip().lower()
    return {"cpu": True, "none": False}.get(value)


def install() -> list[str]:
    """Apply all needed patches once per process; returns their names."""
    global _installed
    if _installed is None:
        from rollspec.engine.vllm.compat import vllm_version

        version = vllm_version()
        _installed = [p.name for p in (cls() for cls in PATCHES) if p.install(version)]
    return _installed


def missing() -> list[str]:
    """Patches that correct outputs need and this process does not have: with one missing, speculation must stay off."""
    have = _installed or ()
    return [cls.name for cls in PATCHES if cls.correctness and cls.name not in have and cls().needed()]
