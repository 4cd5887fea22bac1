"""Planted faults for measuring the audit: vLLM logits processors that replace 1 % of the tokens (at temperature 1), or
the share that PLANTED_SHARE says.

Loaded by name in the engine's own process: `logits_processors=["benchmarks.planted:Uniform"]`.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

VARIABLE = "PLANTED_SHARE"
SHARE = float(os.environ.get(VARIABLE, "0.01"))


class _Mixture(LogitsProcessor):  # type: ignore[misc]
    """(1 - SHARE) times the policy, and SHARE of something else."""

    def other(self, p: torch.Tensor) -> torch.Tensor:
        """[n, V] the distribution that the share's tokens come from, given the policy's."""
        raise NotImplementedError

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        """[n, V] logits of the mixture; greedy requests see their order unchanged."""
        p = logits.float().softmax(-1)
        return ((1 - SHARE) * p + SHARE * self.other(p)).log().to(logits.dtype)


class Uniform(_Mixture):
    """The share's tokens are uniform over the vocabulary."""

    def other(self, p: torch.Tensor) -> torch.Tensor:
        """1 / V."""
        return torch.full_like(p, 1.0 / p.shape[-1])


class MostLikely(_Mixture):
    """The share's tokens are the most likely one."""

    def other(self, p: torch.Tensor) -> torch.Tensor:
        """All on the argmax."""
        return torch.zeros_like(p).scatter_(-1, p.argmax(-1, keepdim=True), 1.0)


class Second(_Mixture):
    """The share's tokens are the second likeliest one."""

    def other(self, p: torch.Tensor) -> torch.Tensor:
        """All on the second."""
        return torch.zeros_like(p).scatter_(-1, p.topk(2).indices[:, 1:], 1.0)
