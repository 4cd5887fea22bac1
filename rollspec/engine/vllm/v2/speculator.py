"""The speculator of an engine whose drafts are all model-free; the drafts themselves are written by `adapter.Adapter`.

vLLM builds a method's speculator by name (vllm/v1/worker/gpu/spec_decode/__init__.py, `init_speculator`), without a
plug-in point. Where rollspec named the method `compat.MEMORY_METHOD`, `init_speculator` returns this class instead.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator


class ModelFreeSpeculator(BaseSpeculator):  # type: ignore[misc] # vLLM has no types that mypy sees
    """Proposes filler: valid tokens, which a step verifies only in padded draft slots."""

    supports_mm_inputs = False
    draft_logits = None  # drafts are one-hot

    def __init__(self, num_speculative_tokens: int) -> None:
        self.k = num_speculative_tokens

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Nothing is captured: no model runs."""

    def capture(self) -> None:
        """Nothing is captured: no model runs."""

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,  # [max_num_reqs, 1]
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """The last sampled token of every request, k times, [num_reqs, k]: on the device, without a look at it.

        -1 would reach an embedding where a padded slot is not left out of the step.
        """
        if kwargs.get("dummy_run"):
            return last_sampled.new_zeros(input_batch.num_reqs, self.k)
        return last_sampled[input_batch.idx_mapping].expand(-1, self.k).clone()
