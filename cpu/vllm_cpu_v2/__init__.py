"""vLLM's second model runner (V2) on CPU at full speed and without Triton.

V2 keeps its per-step bookkeeping in Triton kernels. The CPU build of vLLM has no Triton, so V2 does not start there.
This package registers numpy and torch implementations of those kernels through vLLM's own registry
(`vllm.triton_utils.dispatcher.register_kernels`). It imports vllm, torch and numpy only.

    VLLM_USE_V2_MODEL_RUNNER=1 vllm serve MODEL          # the plug-in `vllm_cpu_v2` does the rest

Without plug-ins: `vllm_cpu_v2.install()` in the worker process, before it builds the model runner.
"""

from .installation import install
from .plugin import register

__all__ = ["install", "register"]
