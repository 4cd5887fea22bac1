"""Everything V2 needs before it can run on a CPU without Triton; `install` is the whole of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

INSTALLED = False


class MissingKernel:
    """A Triton kernel that nothing replaces; a launch says so in one sentence instead of a `TypeError`."""

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
    from vllm.triton_utils.dispatcher import register_kernels

    from .kernels import KERNELS

    # vLLM's scan for copies of a kernel stumbles over llvmlite's library object, which answers to any name.
    hidden = {name: sys.modules.pop(name) for name in [n for n in sys.modules if n.partition(".")[0] == "llvmlite"]}
    try:
        register_kernels(KERNELS)
    finally:
        sys.modules.update(hidden)
    import vllm.v1.worker.gpu.spec_decode.ngram.speculator as ngram

    ngram.HAS_TRITON = True  # it refuses to start without Triton; its two kernels are registered above


def _complete_placeholder() -> None:
    """Give vLLM's placeholder of Triton what V2's host code uses, and name kernels that nobody replaces."""
    from vllm.triton_utils import triton
    from vllm.utils.math_utils import next_power_of_2

    def jit(*args: Any, **options: Any) -> Any:
        return MissingKernel(args[0]) if args and callable(args[0]) else MissingKernel

    triton.next_power_of_2 = next_power_of_2
    triton.jit = jit
