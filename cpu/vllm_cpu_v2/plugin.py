"""The `vllm.general_plugins` entry point: arms the installation where V2 will run on a CPU, and does nothing elsewhere.

vLLM loads general plug-ins in every process, before it knows the worker. The kernels are needed in workers only, so the
entry point hooks `CpuPlatform.register_triton_kernel_overrides`, which vLLM calls once per worker, right after the
plug-ins and before it imports the model runner (`vllm/v1/worker/worker_base.py`).
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from .installation import install

ARMED = "_vllm_cpu_v2_armed"


def register() -> None:
    """Arm the installation if the platform is a CPU; otherwise do nothing.

    Whether an engine runs V2 is asked when it is built: vLLM loads plug-ins once per process, which may build several.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    platform = type(current_platform)
    if getattr(platform, ARMED, False):
        return
    setattr(platform, ARMED, True)
    allow_without_triton()
    install_with_overrides(platform)
    honour_async_scheduling()


class WhereAsked:
    """True while `VLLM_USE_V2_MODEL_RUNNER=1`. Engines that do not ask for V2 find no Triton, as before."""

    def __init__(self, found: bool) -> None:
        self.found = found

    def __bool__(self) -> bool:
        from vllm import envs

        return self.found or bool(envs.VLLM_USE_V2_MODEL_RUNNER)


def allow_without_triton() -> None:
    """Let `VllmConfig` accept V2: its validation refuses every machine without Triton."""
    import vllm.config.vllm

    vllm.config.vllm.HAS_TRITON = WhereAsked(vllm.config.vllm.HAS_TRITON)


def install_with_overrides(platform: Any) -> None:
    """Register our kernels wherever vLLM registers its own CPU kernels."""
    overrides = platform.register_triton_kernel_overrides

    def register_triton_kernel_overrides(cls: Any) -> None:
        overrides()
        from vllm import envs

        if envs.VLLM_USE_V2_MODEL_RUNNER:
            install()

    platform.register_triton_kernel_overrides = classmethod(register_triton_kernel_overrides)


def honour_async_scheduling() -> None:
    """Keep an explicit `async_scheduling=True`, which `CpuPlatform.check_and_update_config` turns off.

    V2 runs with the asynchronous scheduler on a CPU: the host schedules and detokenises a step while the worker
    computes another. Engines that say nothing stay synchronous, as on every CPU engine of vLLM.
    """
    from vllm.engine.arg_utils import EngineArgs

    create = EngineArgs.create_engine_config

    @wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = create(self, *args, **kwargs)
        if self.async_scheduling:
            config.scheduler_config.async_scheduling = True
        return config

    EngineArgs.create_engine_config = create_engine_config
