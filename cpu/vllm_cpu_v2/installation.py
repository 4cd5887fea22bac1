"""Everything V2 needs before it can run on a CPU without Triton; `install` is the whole of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

INSTALLED = False


class MissingKernel:
    """A Triton kernel without a replacement: a launch raises one sentence instead of a `TypeError`."""

    def __init__(self, func: Callable[..., Any]) -> None:
        self.func = func
        self.name = f"{func.__module__}.{func.__qualname__}"
        self.__doc__ = func.__doc__

    def __getitem__(self, grid: object) -> Callable[..., Any]:
        return self

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Raise `NotImplementedError` with the kernel's name."""
        raise NotImplementedError(
            f"vllm_cpu_v2 has no CPU implementation of the Triton kernel {self.name}: turn the feature that needs it "
            "off, or run with VLLM_USE_V2_MODEL_RUNNER=0."
        )


def install() -> None:
    """Make V2 ready in this process: placeholders, kernels, flags. Idempotent; does nothing where Triton is installed.

    Call it in the worker process before the model runner is built. It imports `vllm.v1.worker.cpu.shm` first, because
    V2's modules bind what that module replaces (`async_tensor_h2d`, `UvaBuffer`) when they are imported.
    """
    global INSTALLED
    from vllm.triton_utils import HAS_TRITON

    if INSTALLED or HAS_TRITON:
        return
    INSTALLED = True
    import vllm.v1.worker.cpu.shm  # noqa: F401

    _complete_placeholder()
    from vllm.triton_utils import dispatcher

    from .kernels import KERNELS

    scan, dispatcher._rebind_kernels = dispatcher._rebind_kernels, rebind
    try:
        dispatcher.register_kernels(KERNELS)
    finally:
        dispatcher._rebind_kernels = scan
    import vllm.v1.worker.gpu.model_runner as runner
    import vllm.v1.worker.gpu.spec_decode.ngram.speculator as ngram
    import vllm.v1.worker.gpu_worker as worker

    ngram.HAS_TRITON = True  # it refuses to start without Triton; its two kernels are registered above
    worker.HAS_TRITON = True  # from 0.33 on the worker refuses, too
    runner.DeviceMemoryProfiler = ModelMemory


def rebind(overrides: Iterable[tuple[Any, Any]]) -> None:
    """Put replacements in the place of kernels, (kernel, replacement) each, wherever vLLM's modules hold them.

    In place of `_rebind_kernels`, which compares every object of every module of the process with every kernel: more
    than a second. V2's kernels are vLLM's own affair.
    """
    replacements = {id(kernel): replacement for kernel, replacement in overrides}
    for module in [m for name, m in sys.modules.items() if name.partition(".")[0] == "vllm"]:
        for name, value in list(vars(module).items()):
            if id(value) in replacements:
                setattr(module, name, replacements[id(value)])
            elif hasattr(value, "__dict__") and id(kernel := vars(value).get("kernel")) in replacements:
                value.kernel = replacements[id(kernel)]  # an owner, which warms its kernel up
                if not isinstance(value, type):
                    vars(value).pop("_kernel_arg_names", None)


class ModelMemory:
    """`DeviceMemoryProfiler` on a CPU: that one collects garbage three times around loading, most of a second."""

    def __init__(self, device: Any = None) -> None:
        self.consumed_memory = 0.0

    def __enter__(self) -> ModelMemory:
        self._before = self._used()
        return self

    def __exit__(self, *error: object) -> None:
        self.consumed_memory = self._used() - self._before

    @staticmethod
    def _used() -> float:
        from vllm.platforms import current_platform

        return float(current_platform.get_current_memory_usage())


def _complete_placeholder() -> None:
    """Give vLLM's placeholder of Triton what V2's host code uses, and name the kernels without a replacement."""
    from vllm.triton_utils import triton
    from vllm.utils.math_utils import next_power_of_2

    def jit(*args: Any, **options: Any) -> Any:
        return MissingKernel(args[0]) if args and callable(args[0]) else MissingKernel

    triton.next_power_of_2 = next_power_of_2
    triton.jit = jit
