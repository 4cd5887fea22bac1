"""vLLM-CPU: speculative decoding at temperature > 0 divides the logits by uninitialised memory."""

from __future__ import annotations

from typing import Any

from rollspec.engine.vllm.hooks.base import Around, Patch, on_import


class CpuExpandBatch(Patch):
    """Plain-torch `expand_batch_to_tokens`.

    `cpu_triton_utils._expand_kernel_impl` hands `_ensure_int64(output)` to the C++ operator: for a float or int32
    output that is a copy, so temperature, top-k and top-p stay whatever `new_empty` found. Symptoms: NaN log-probs,
    wrong tokens, no error.
    """

    name = "cpu_expand_batch"
    targets = (
        "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens",
        "vllm.utils.cpu_triton_utils:_expand_kernel_impl",
    )
    versions = ">=0.29,<0.33"
    runner = "v1"
    correctness = True
    cpu_only = True
    why = "vLLM's kernel drops its result for float and int32 outputs: tokens are wrong, without an error (issue 55005)"
    removal = "the probe in `needed` finds the kernel writing into its output"

    @classmethod
    def needed(cls) -> bool:
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

    @classmethod
    def apply(cls, around: Around | None = None) -> None:
        """Replace the function once the sampler is imported; importing it here would pull in CUDA modules."""
        module, _, name = cls.targets[0].partition(":")
        on_import(module, lambda found: setattr(found, name, expand_batch_to_tokens))


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
