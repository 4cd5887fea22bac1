"""The drafter's weights in one worker: those that run, and a second copy of the drafter that new ones are loaded into.

What the drafter shares with its target (embedding, LM head) is left out of every payload and never written: vLLM shares
them by reference, so writing them would change what is sampled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rollspec.engine.vllm.hooks.cpu import repack
from rollspec.engine.vllm.hooks.table import PackedLinear
from rollspec.head.draft_head import DraftHead
from rollspec.head.swap.payload import fingerprint, read_folder
from rollspec.machine import local_folder


class DraftWeights:
    """One worker's weights. `load` may run on another thread than `exchange`; never both at once.

    Those that run stay where they are: CUDA graphs hold their addresses.
    """

    def __init__(self, owner: DraftHead) -> None:
        self.owner = owner
        shared = {id(m) for m in owner.target_model.modules()}
        self.own = {
            name: p
            for name, p in owner.draft_model.named_parameters()
            if p.numel() and id(owner.draft_model.get_submodule(name.rpartition(".")[0])) not in shared
        }
        """Parameters of the draft model that are not the target's."""
        self.marks = self._fingerprint()
        """What the fingerprint of the running weights is meant to be."""
        self._original: dict[str, torch.Tensor] | None = None  # as on disk
        self._second: Any = None  # the second copy: torch.nn.Module with vLLM's `load_weights`
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []  # the same weight in both copies of the drafter
        self._packed: list[tuple[Any, Any]] = []  # the same layer, where vLLM-CPU packs its weight

    def original(self) -> dict[str, torch.Tensor]:
        """What the engine was started with, by checkpoint name."""
        if self._original is None:
            self._original = self.strip(read_folder(local_folder(self.owner.draft_folder)))
        return self._original

    def strip(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Without what is the target's own in this engine."""
        live: Any = self.owner.draft_model
        target: Any = self.owner.target_model
        shared = ["verifier_"]
        inner = getattr(live, "model", live)
        if getattr(inner, "embed_tokens", None) is getattr(getattr(target, "model", None), "embed_tokens", self):
            shared.append("embed_tokens")
        if getattr(live, "lm_head", None) is getattr(target, "lm_head", self):
            shared.append("lm_head")
        return {n: t for n, t in tensors.items() if not any(s in n for s in shared)}

    def intact(self) -> bool:
        """Whether the running weights are what was put there; a policy sync or a sleep may have overwritten them."""
        return self.marks == self._fingerprint()

    def _fingerprint(self) -> list[float]:
        return fingerprint(self.own.values())

    # ---- the second copy --------------------------------------------------------------------------------------------

    def build(self) -> None:
        """Make the second copy of the drafter, once; its attention layers are not the engine's."""
        if self._second is not None:
            return
        from vllm.config import set_current_vllm_config

        config = self.owner.vllm_config
        context = config.compilation_config.static_forward_context
        kept = dict(context)
        context.clear()
        try:
            with set_current_vllm_config(config):
                second = self.owner.second_model()
        finally:
            context.clear()
            context.update(kept)
        target = self.owner.target_model
        live: dict[str, Any] = dict(self.owner.draft_model.named_modules())
        shared = {id(m) for m in target.modules()}
        for name in [n for n, m in live.items() if id(m) in shared and n.endswith(("embed_tokens", "lm_head"))]:
            # What is shared with the target is needed once.
            parent, _, leaf = name.rpartition(".")
            setattr(second.get_submodule(parent), leaf, torch.nn.Module())
        parameters = dict(second.named_parameters())
        written = {p.data_ptr() for p in target.parameters() if p.numel()}
        self._pairs = [
            (p, parameters[n]) for n, p in self.own.items() if n in parameters and p.data_ptr() not in written
        ]
        self._packed = [
            (live[name], other)
            for name, other in second.named_modules()
            if name in live and id(live[name]) not in shared and hasattr(other, "cpu_linear")
        ]
        self._second = second

    def load(self, tensors: Mapping[str, torch.Tensor]) -> list[float]:
        """Load weights into the second copy; returns the fingerprint that the running ones have after `exchange`."""
        with torch.no_grad():
            self._second.load_weights(iter(tensors.items()))
        repack(self._second)  # nothing to do where nothing is packed
        return fingerprint(second for _, second in self._pairs)

    def exchange(self, marks: list[float] | None = None) -> None:
        """Copy the second drafter's weights into the first one's storage; `marks`: their fingerprint, if known."""
        with torch.no_grad():
            for mine, new in self._pairs:
                mine.data.copy_(new.data)
        for layer, other in self._packed:
            # vLLM-CPU packs a weight into a closure: the packed ones are exchanged.
            PackedLinear.exchange(layer, other)
        if self.owner.device.type == "cuda":
            torch.cuda.synchronize()
        self.marks = self._fingerprint() if marks is None else marks
