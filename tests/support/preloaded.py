"""What an engine of the tests would import and compile when it starts: loaded once, by the server that forks them.

An engine then starts in two seconds of one core instead of twenty. rollspec's own plugin is not among it: every process
loads it as vLLM has it, with the environment that it has.
"""

from __future__ import annotations

import importlib
from typing import Any

MODULES = (
    "openai",
    "pytest",
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3",
    "drafter_online.service",
)


def kernels() -> None:
    """Those that stand in for Triton's, which vLLM looks for in every module that is loaded."""
    from vllm.platforms import current_platform
    from vllm_cpu_v2 import plugin

    plugin.register()
    platform: Any = type(current_platform)
    platform.register_triton_kernel_overrides()
    platform.register_triton_kernel_overrides = classmethod(lambda cls: None)


def lookups() -> None:
    """numba reads what it has compiled for a second, and scipy is imported where costs are fitted."""
    import rollspec.tuning.cost  # noqa: F401
    from rollspec.config import RollspecConfig
    from rollspec.step import DraftEngine

    engine = DraftEngine(RollspecConfig.load({}, env={}), 64)
    engine.begin("a", [1, 2, 3], 32)
    for n in range(1, 10):
        engine.timed(n, True, 0.01 * n, 1)
        engine.step(["a"], [[1 + n % 3]], {})


for _name in MODULES:
    importlib.import_module(_name)
kernels()
lookups()
