"""vLLM-CPU: speculative decoding at temperature > 0 divides the logits by uninitialised memory."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from rollspec.engine.vllm.patches.base import Patch, on_import


class CpuExpandBatch(Patch):
    """Plain-torch `expand_batch_to_tokens`.

    `cpu_triton_utils._expand_kernel_impl` hands `_ensure_int64(output)` to the C++ operator: for a float or int32
    output that is a copy, so temperature, top-k and top-p stay whatever `new_empty` found. Symptoms: NaN log-probs,
    wrong tokens, no error.
    """

    name = "cpu_expand_batch"
    versions = ">=0.29,<0.33"
    upstream = "vllm/utils/cpu_triton_utils.py:_expand_kernel_impl, vllm issue 55005"
    removal = "the probe in `needed` finds the kernel writing into its output"

    def needed(self) -> bool:
        """Run the CPU kernel on a float tensor and see whether it wrote its result there."""
        import torch
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            return False
        from vllm.utils import cpu_triton_utils

        out = torch.full((3,), -1.0)
        try:
            cpu_triton_utils._expand_kernel_impl(out, torch.tensor([0.5, 2.0]), torch.tensor([1, 3]), 0, 1)
        except (RuntimeError, AttributeError, TypeError):
            return True  # an operator that refuses floats is as unusable as one that drops them
        return out.tolist() != [0.5, 2.0, 2.0]

    def apply(self) -> None:
        """Replace the function once the sampler is imported; importing it here would pull in CUDA modules."""
        on_import("vllm.v1.sample.rejection_sampler", self._patch)

    @staticmethod
    def _patch(module: ModuleType) -> None:
        setattr(module, "expand_batch_to_tokens", expand_batch_to_tokens)  # noqa: B010


def expand_batch_to_tokens(
    x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Any:
    """Repeat `x[b]` once per token of request b: `[a, b, c]`, `[2, 5, 6]` -> `[a, a, b, b, b, c]`.

    Args:
        x: [batch] values. cu_num_tokens: [batch] cumulative token counts. num_tokens: their last entry.
        replace_from: value of `x` to replace by `replace_to` (greedy requests' temperature 0 becomes 1).

    Returns:
        [num_tokens] tensor of x's dtype.
    """
    import torch

    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).to(torch.int64)
    out = torch.repeat_interleave(x, counts, output_size=num_tokens)
    return torch.where(out == replace_from, torch.full_like(out, replace_to), out)
