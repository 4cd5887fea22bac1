"""`SwapOwner` of a worker's draft head: the only place that knows both it and the swap."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rollspec.engine.vllm.swap.owner import KnownAcceptance

if TYPE_CHECKING:
    from rollspec.engine.vllm.head import DraftHead


class HeadOwner:
    """See `SwapOwner`."""

    def __init__(self, learned: DraftHead, vllm_config: Any) -> None:
        self.learned = learned
        self.vllm_config = vllm_config

    @property
    def draft_model(self) -> torch.nn.Module:
        """Of vLLM's own proposer."""
        model: torch.nn.Module = self.learned.drafter.model
        return model

    @property
    def target_model(self) -> torch.nn.Module:
        """Of the runner."""
        model: torch.nn.Module = self.learned.runner.get_model()
        return model

    @property
    def draft_folder(self) -> str:
        """From the speculative configuration."""
        return str(self.learned.drafter.draft_model_config.model)

    @property
    def base(self) -> str:
        """Of the target's configuration."""
        from drafter_online.head import base_of

        return base_of(self.learned.runner.model_config.hf_text_config)

    @property
    def device(self) -> torch.device:
        """Of the runner."""
        device: torch.device = self.learned.runner.device
        return device

    @property
    def asleep(self) -> bool:
        """As the worker's `sleep` and `wake_up` said last."""
        return self.learned.asleep

    @property
    def policy_version(self) -> int:
        """Of the proposer."""
        return self.learned.proposer.version

    @property
    def acceptance(self) -> KnownAcceptance:
        """Of the router."""
        return self.learned.proposer.router.acceptance

    def second_model(self) -> torch.nn.Module:
        """By vLLM's own proposer (v1/spec_decode/llm_base_proposer.py)."""
        model: torch.nn.Module = self.learned.drafter._get_model()
        return model

    def rewind(self) -> int:
        """Of the kept hidden states."""
        return self.learned.states.rewind()

    def swapped(self, version: int, acceptance: dict[str, list[float]] | None = None) -> None:
        """The router begins to measure anew, or knows what it knew."""
        self.learned.proposer.swapped(version, acceptance)

    def canary(self, running: bool) -> None:
        """The router asks for drafts to be scored more often."""
        self.learned.proposer.on_trial = running

    def record_fault(self, cause: str) -> None:
        """With the engine's other faults."""
        self.learned.bridge.count(cause)
