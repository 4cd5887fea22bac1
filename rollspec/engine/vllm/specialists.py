"""Further heads beside the general one, each for a domain; the surest of them drafts for a request.

TAPS (arXiv 2603.27027) trains drafters on the text of one task each and finds that choosing between them by confidence
at inference beats averaging their weights. Here all heads read every step, each into a KV cache of its own, and propose
for every request; per request and step the chain goes on whose cumulative probabilities, as its drafter gives them, sum
highest: the tokens that it expects to be accepted. A pass of S heads costs S passes, which the router is told as it
measures them. What is chosen is a one-hot draft, so any choice is exact.

The general head is the one that is trained and swapped; specialists stay as they were loaded. What is known of
acceptance, and what a trial of new general weights is judged by, is that of the chains that were chosen.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from rollspec.engine.vllm import hooks
from rollspec.engine.vllm.heads import GENERAL
from rollspec.engine.vllm.hooks import runner_v1 as v1
from rollspec.engine.vllm.ranks import Ranks

logger = logging.getLogger("rollspec")

ATTRIBUTE = "_rollspec_specialists"


def arrange(drafter: Any, folders: Mapping[str, str]) -> None:
    """Have vLLM's proposer load the heads in `folders` (by domain) after its own, before the KV cache is laid out."""
    load_model = drafter.load_model

    def load_all(target_model: Any) -> None:
        load_model(target_model)
        found = Specialists(drafter, target_model)
        hooks.keep(drafter, ATTRIBUTE, found)
        for name, folder in folders.items():
            found.add(name, folder)

    v1.DrafterLoadModel.put(drafter, load_all, __name__)


def of(drafter: Any) -> Specialists | None:
    """The specialists that were loaded with a proposer, if any were."""
    found: Specialists | None = getattr(drafter, ATTRIBUTE, None)
    return found if found is not None and len(found.models) > 1 else None


class Passes(Protocol):
    """What the heads write into: the passes of the draft head that they take turns in."""

    runner: Any
    """The model runner."""

    probs: list[torch.Tensor]
    """Per pass, what the drafter gave its token, [requests]."""

    def begin_passes(self) -> None:
        """Forget the passes before."""


@dataclasses.dataclass(slots=True)
class Tally:
    """What one head's chains came to: chosen, judged and right tokens."""

    chains: int = 0
    judged: int = 0
    right: int = 0


class Specialists:
    """All heads of one worker. `models[0]` is vLLM's own; a head that cannot be loaded is left out, and said to be."""

    def __init__(self, drafter: Any, target_model: Any) -> None:
        self.drafter = drafter
        self.names = [GENERAL]
        self.models = [drafter.model]
        self.tallies = [Tally()]
        self.woke = False
        self._target = target_model
        self._kept: list[dict[str, torch.Tensor]] = [{}]  # what each head was loaded with, on the CPU
        self._served: dict[str, int] = {}  # head of each request's latest chain
        self._learned: Passes | None = None
        self._ranks = Ranks.of(int(drafter.vllm_config.parallel_config.tensor_parallel_size))
        self._layers = drafter.vllm_config.compilation_config.static_forward_context

    def add(self, name: str, folder: str) -> None:
        """Load one head; every rank must call it."""
        before = set(self._layers)
        model, kept, why = None, {}, "another rank could not load it"
        try:
            model = self._load(folder)
            kept = {n: t.detach().to("cpu", copy=True) for n, t in self._own(model).items()}
            if not all(bool(t.isfinite().all()) for t in kept.values() if t.is_floating_point()):
                raise ValueError("it has NaN or infinity in it")
        except Exception as e:  # the others go on
            model, why = None, f"{type(e).__name__}: {e}"
        finally:
            self._run(self.models[0])
        added = set(self._layers) - before
        if not self._ranks.least(int(model is not None)):  # ranks run the same heads, or wait for each other for ever
            for layer in added:
                del self._layers[layer]
            logger.warning("rollspec: the specialist %r in %s is left out (%s).", name, folder, why)
            return
        # Its attention layers get a cache of their own, beside the general head's and under the same block table.
        cached = {n for n in added if hasattr(self._layers[n], "get_kv_cache_spec")}
        v1.DrafterLayers.put(self.drafter, self.drafter._draft_attn_layer_names | cached, __name__)
        self.models.append(model)
        self.names.append(name)
        self.tallies.append(Tally())
        self._kept.append(kept)

    def _load(self, folder: str) -> Any:
        from vllm.compilation.backends import set_model_tag
        from vllm.model_executor.model_loader import get_model

        drafter, number = self.drafter, len(self.models)
        config = drafter.vllm_config
        if drafter.use_local_argmax_reduction or drafter.use_heterogeneous_vocab:
            raise ValueError("this engine's drafter tells no probabilities to choose by")
        layers = [layer for layer in self._layers.values() if hasattr(layer, "get_kv_cache_spec")]
        if len({type(layer.get_kv_cache_spec(config)) for layer in layers}) > 1:
            raise ValueError("caches of several kinds are laid out in groups, over which it could be spread")
        # Same shape, other weights: `heads.settle` has compared the two.
        mine = copy.copy(drafter.speculative_config.draft_model_config)
        mine.model = folder
        with set_model_tag(f"eagle_head_{number}"):
            model = get_model(
                vllm_config=drafter._create_draft_vllm_config(), model_config=mine,
                load_config=drafter.speculative_config.draft_load_config, prefix=f"specialist_{number}",
            )  # fmt: skip
        self._run(model)
        language_model = getattr(self._target, "get_language_model", lambda: self._target)()
        drafter._maybe_share_embeddings(language_model)
        drafter._maybe_share_lm_head(language_model)
        return model

    def _run(self, model: Any) -> None:
        """vLLM's proposer runs `model` from now on."""
        v1.DrafterModel.put(self.drafter, model, __name__)

    def attach(self, learned: Passes) -> None:
        """All heads run wherever vLLM's proposer would run its own."""
        self._learned = learned
        self.models[0] = self.drafter.model  # vLLM may have wrapped it since
        self._propose = v1.DrafterPropose.put(self.drafter, self.propose, __name__)
        self._dummy_run = v1.DrafterDummyRun.put(self.drafter, self.dummy_run, __name__)

    def propose(self, **given: Any) -> torch.Tensor:
        """In the place of the proposer's `propose`: for each request the surest head's row, [requests, passes]."""
        assert self._learned is not None
        common, learned = given.pop("common_attn_metadata"), self._learned
        rows, probs = [], []
        try:
            for model in self.models:
                self._run(model)
                learned.begin_passes()
                # vLLM moves these tensors on from pass to pass.
                rows.append(self._propose(**given, common_attn_metadata=_own_tensors(common)))
                probs.append(learned.probs)
        finally:
            self._run(self.models[0])
        if not probs[0]:  # no passes: the heads only read
            learned.begin_passes()
            first: torch.Tensor = rows[0]
            return first
        each = torch.stack([torch.stack(p, dim=1) for p in probs])  # [heads, requests, passes]
        best = each.nan_to_num(0.0).cumprod(-1).sum(-1).argmax(0)  # [requests]
        requests = torch.arange(len(best), device=best.device)
        learned.probs = list(each[best, requests].unbind(1))
        req_ids = learned.runner.input_batch.req_ids
        self._served = dict(zip(req_ids, best.tolist(), strict=False))
        chosen: torch.Tensor = torch.stack(rows)[best, requests]
        return chosen

    def dummy_run(self, *args: Any, **kwargs: Any) -> None:
        """Warm up, or capture the graphs of, every head."""
        try:
            for model in self.models:
                self._run(model)
                self._dummy_run(*args, **kwargs)
        finally:
            self._run(self.models[0])

    def scored(self, req_id: str, hits: int, judged: int) -> None:
        """A request's latest chain was judged."""
        if judged and (head := self._served.pop(req_id, None)) is not None:
            tally = self.tallies[head]
            tally.chains += 1
            tally.judged += judged
            tally.right += hits

    def restore(self) -> None:
        """The engine woke up: what its memory holds is not known, so every specialist is written again."""
        from rollspec.engine.vllm.hooks.cpu_weights import repack

        self.woke = False
        with torch.no_grad():
            for model, kept in zip(self.models[1:], self._kept[1:], strict=True):
                for name, tensor in self._own(model).items():
                    tensor.data.copy_(kept[name])
                repack(model)

    def info(self) -> dict[str, dict[str, int]]:
        """Tallies by head."""
        return {n: dataclasses.asdict(t) for n, t in zip(self.names, self.tallies, strict=True)}

    def _own(self, model: Any) -> dict[str, torch.Tensor]:
        """Parameters and buffers that a head does not share with the target."""
        shared = {id(m) for m in self._target.modules()}
        found: dict[str, torch.Tensor] = {}
        for prefix, module in model.named_modules():
            if id(module) not in shared:
                tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
                found |= {f"{prefix}.{n}": t for n, t in tensors if t.numel()}
        return found


def _own_tensors(common: Any) -> Any:
    """vLLM's metadata with copies of its tensors, but for the block table, which nobody writes."""
    copies = {
        f.name: value.clone()
        for f in dataclasses.fields(common)
        if isinstance(value := getattr(common, f.name), torch.Tensor) and f.name != "block_table_tensor"
    }
    return dataclasses.replace(common, **copies)
