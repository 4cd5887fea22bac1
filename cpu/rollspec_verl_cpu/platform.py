"""`PlatformCPU`: verl's own extension point for a device (verl/plugin/platform/platform_manager.py:29)."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class _CpuModule(types.ModuleType):
    """Stands in for `torch.cuda`: what `torch.cpu` lacks does nothing."""

    def __init__(self) -> None:
        super().__init__("rollspec_verl_cpu_device")

    def is_available(self) -> bool:
        """False makes verl's memory and performance helpers return early."""
        return False

    def get_device_name(self, *_: Any) -> str:
        return "CPU"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if hasattr(torch.cpu, name):
            return getattr(torch.cpu, name)
        if name.startswith(("memory_", "max_memory_")):
            return lambda *a, **k: 0
        if name == "mem_get_info":
            return lambda *a, **k: (0, 0)
        return lambda *a, **k: None


def register() -> None:
    """Register the platform `cpu` with verl."""
    from verl.plugin.platform import PlatformRegistry
    from verl.plugin.platform.platform_base import PlatformBase

    module = _CpuModule()

    class PlatformCPU(PlatformBase):  # type: ignore[misc]
        """Every accelerator call of verl, answered for a CPU."""

        device_name = "cpu"
        vendor_name = "cpu"
        device_module = module

        def is_available(self) -> bool:
            return True

        def current_device(self) -> torch.device:
            # verl does `x.to(get_device_id())`, where an int would mean an accelerator.
            return torch.device("cpu")

        def device_count(self) -> int:
            return 1

        def set_device(self, device_index: Any) -> None:
            pass

        def synchronize(self, device_index: Any = None) -> None:
            pass

        def manual_seed(self, seed: int) -> None:
            torch.manual_seed(seed)

        def manual_seed_all(self, seed: int) -> None:
            torch.manual_seed(seed)

        def set_allocator_settings(self, settings: Any) -> None:
            pass

        def empty_cache(self) -> None:
            pass

        def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
            return None, None

        def communication_backend_name(self) -> str:
            return "gloo"

        def visible_devices_envvar(self) -> str:
            return "CUDA_VISIBLE_DEVICES"

        @contextmanager
        def nvtx_range(self, msg: str) -> Iterator[None]:
            yield

        def profiler_start(self) -> None:
            pass

        def profiler_stop(self) -> None:
            pass

        def ray_resource_name(self) -> str:
            # Ray is started with a pretended GPU; vLLMReplica reads `get_accelerator_ids()["GPU"]`.
            return "GPU"

        def ray_noset_envvars(self) -> list[str]:
            return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

        def is_ipc_supported(self) -> bool:
            return False  # weights travel to the engine through shared memory

        def cudart(self) -> None:
            return None

    PlatformRegistry.register(platform="cpu")(PlatformCPU)
