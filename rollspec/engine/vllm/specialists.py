"""Further heads, or draft models, beside the general one, each for a domain; one of them drafts for a request.

TAPS (arXiv 2603.27027) trains drafters on the text of one task each and finds that choosing between them by confidence
at inference beats averaging their weights. With `proposal.head.route: confidence` all heads read every step, each into
a KV cache of its own, and propose for every request; per request and step that draft is verified whose cumulative
probabilities, by its own head, sum highest: the number of accepted tokens that the head expects. A pass of S heads
costs S passes, and the router measures it so.

OSD (arXiv 2310.07177) sends each class of queries to a draft model of its own. With `route: domain` a request is
drafted for by the head of its domain, or the general one where it has none, and a step runs only the heads of its
requests. A chosen draft is one-hot, so any choice is lossless.

The general head is the one that is trained and swapped; specialists keep the weights that they were loaded with. The
acceptance rate counts the drafts that were chosen; the verdict on a canary of the general weights, and what it learns
from rejections, count its own.

With CUDA graphs the target keeps its own, and the heads run without: vLLM captures its speculator's passes with one
model in them, which a replay would run in the place of every other. Not run on a GPU.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rollspec.engine.vllm import hooks
from rollspec.engine.vllm.hooks import table as v2
from rollspec.engine.vllm.hooks.cpu import repack
from rollspec.head.checkpoint_resolver import GENERAL
from rollspec.head.ranks import Ranks

logger = logging.getLogger("rollspec")

ATTRIBUTE = "_rollspec_specialists"


def arrange(speculator: Any, folders: Mapping[str, str], ranks: Ranks) -> None:
    """Have vLLM's speculator load the heads in `folders` (by domain) after its own.

    Every attention layer that `load_model` finds after `load_draft_model` is the drafter's, so those of all heads get a
    KV cache and metadata.
    """
    load = speculator.load_draft_model

    def load_all(target: torch.nn.Module, target_layers: set[str]) -> torch.nn.Module:
        v2.LoadHead.put(speculator, load, __name__)  # what is loaded later is a second copy of the general head
        general: torch.nn.Module = load(target, target_layers)
        found = Specialists(speculator, target, general, ranks)
        for name, folder in folders.items():
            found.add(name, folder)
        if len(found.models) > 1:
            hooks.keep(speculator, ATTRIBUTE, found)
            v2.Propose.wrap(speculator, found.propose, __name__)
        return general

    v2.LoadHead.put(speculator, load_all, __name__)


def of(speculator: Any) -> Specialists | None:
    """The specialists that were loaded with a speculator, if any were."""
    return getattr(speculator, ATTRIBUTE, None)


@dataclasses.dataclass(slots=True)
class Tally:
    """Counts of one head's chosen drafts, their known tokens and those that were accepted."""

    drafts: int = 0
    known: int = 0
    accepted: int = 0


class Specialists:
    """All heads of one worker. `models[0]` is vLLM's own; a head that cannot be loaded is left out, with a warning."""

    def __init__(self, speculator: Any, target: torch.nn.Module, general: torch.nn.Module, ranks: Ranks) -> None:
        self.speculator = speculator
        self.names = [GENERAL]
        self.models = [general]
        self.tallies = [Tally()]
        self.stale = False
        self._target = target
        self._kept: list[dict[str, torch.Tensor]] = [{}]  # what each head was loaded with, on the CPU
        self._served: dict[str, int] = {}  # head of each request's latest draft, until that is scored
        self._drafted: dict[str, int] = {}  # the same, until the next one
        self._probs: torch.Tensor | None = None  # each pass writes its confidence here, [max_num_reqs, k]
        self._domain_of: Callable[[str], str] | None = None
        self._ranks = ranks
        self._layers = speculator.vllm_config.compilation_config.static_forward_context

    # ---- loading ----------------------------------------------------------------------------------------------------

    def add(self, name: str, folder: str) -> None:
        """Load one head; every rank must call it."""
        before = set(self._layers)
        model, kept, why = None, {}, "another rank could not load it"
        try:
            model = self._load(folder)
            kept = {n: t.detach().to("cpu", copy=True) for n, t in self._own(model).items()}
            if not all(bool(t.isfinite().all()) for t in kept.values() if t.is_floating_point()):
                raise ValueError("it has NaN or infinity in it")
        except Exception as e:  # the other heads are used without it
            model, why = None, f"{type(e).__name__}: {e}"
        # Ranks run the same heads, or wait for each other for ever.
        if not self._ranks.least(int(model is not None)) or model is None:
            for layer in set(self._layers) - before:
                del self._layers[layer]
            logger.warning("rollspec: the specialist %r in %s is left out (%s).", name, folder, why)
            return
        self.models.append(model)
        self.names.append(name)
        self.tallies.append(Tally())
        self._kept.append(kept)

    def _load(self, folder: str) -> torch.nn.Module:
        """As vLLM loads its own head, with layers of other names; `checkpoint_resolver.settle` compared the shapes."""
        from vllm.compilation.backends import set_model_tag
        from vllm.config import replace
        from vllm.v1.worker.gpu.spec_decode.eagle import utils

        name, make = f"specialist_{len(self.models)}", utils.get_model
        mine = copy.copy(self.speculator.draft_model_config)
        mine.model = folder
        if self.speculator.method == "draft_model":
            alone = replace(self.speculator._draft_vllm_config, model_config=mine)
            with set_model_tag(name):
                return make(vllm_config=alone, prefix=name)  # type: ignore[no-any-return]

        def make_head(**given: Any) -> Any:
            with set_model_tag(name):
                return make(**{**given, "model_config": mine, "prefix": name})

        with v2.MakeHead.during(utils, make_head):
            model: torch.nn.Module = self.speculator.load_draft_model(self._target, set())
        return model

    def _own(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Parameters and buffers that a head does not share with the target."""
        shared = {id(m) for m in self._target.modules()}
        found: dict[str, torch.Tensor] = {}
        for prefix, module in model.named_modules():
            if id(module) not in shared:
                tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
                found |= {f"{prefix}.{n}": t for n, t in tensors if t.numel()}
        return found

    def restore(self) -> None:
        """Write every specialist's weights again: the engine slept, and the contents of its memory are unknown."""
        self.stale = False
        with torch.no_grad():
            for model, kept in zip(self.models[1:], self._kept[1:], strict=True):
                for name, tensor in self._own(model).items():
                    tensor.data.copy_(kept[name])
                repack(model)

    # ---- the step ---------------------------------------------------------------------------------------------------

    def attach(self, probs: torch.Tensor, domain_of: Callable[[str], str] | None = None) -> None:
        """Choose from the next step on.

        Args:
            probs: [max_num_reqs, k], which every pass writes and a chosen draft's are left in.
            domain_of: a request's domain, by which its head is chosen; None: by confidence.
        """
        self._probs, self._domain_of = probs, domain_of

    def each(self, run: Callable[..., Any], *args: Any, heads: Sequence[int] | None = None) -> list[Any]:
        """What `run` returns with each of the heads, or of these, in the general one's place."""
        out = []
        for i in heads if heads is not None else range(len(self.models)):
            with v2.HeadModel.during(self.speculator, self.models[i]):
                out.append(run(*args))
        return out

    def _routed(self, req_id: str, domain_of: Callable[[str], str]) -> int:
        """The head of a request's domain: the one that drafted for it before."""
        if (head := self._drafted.get(req_id)) is not None:
            return head
        name = domain_of(req_id)
        return self.names.index(name) if name in self.names else 0

    def propose(self, propose: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Around the speculator's `propose`: for each request the draft of its head, [requests, k]."""
        kwargs["is_profile"] = True  # without CUDA graphs
        if self._probs is None or kwargs.get("dummy_run"):  # every head is warmed up
            first: torch.Tensor = self.each(lambda: propose(*args, **kwargs))[0]
            return first
        batch, tables = args[0], self.speculator.block_tables
        written = self._probs[: batch.num_reqs, : kwargs["num_speculative_tokens"]]
        slots = tables.slot_mappings.clone()

        def run() -> tuple[torch.Tensor, torch.Tensor]:
            # The first pass writes KV where the target did; the passes after it write over these slots.
            tables.slot_mappings.copy_(slots)
            return propose(*args, **kwargs).clone(), written.clone()

        by = self._domain_of
        routed = None if by is None else [self._routed(r, by) for r in batch.req_ids]
        heads = sorted(set(routed)) if routed else list(range(len(self.models)))
        # [heads, requests, k]
        tokens, probs = (torch.stack(found) for found in zip(*self.each(run, heads=heads), strict=True))
        if routed:
            best = torch.tensor([heads.index(i) for i in routed], device=probs.device)  # [requests]
        else:
            best = probs.nan_to_num(0.0).cumprod(-1).sum(-1).argmax(0)
        requests = torch.arange(len(best), device=best.device)
        written.copy_(probs[best, requests])
        self._served = dict(zip(batch.req_ids, (heads[i] for i in best.tolist()), strict=True))
        if len(self._drafted) > 4 * len(self._probs):  # of requests that ended
            self._drafted.clear()
        self._drafted |= self._served
        return tokens[best, requests]

    def drafted(self, req_id: str) -> bool:
        """Whether a request's latest draft is a specialist's."""
        return self._drafted.get(req_id, 0) != 0

    def scored(self, req_id: str, accepted: int, known: int) -> None:
        """A request's latest draft was scored."""
        if known and (head := self._served.pop(req_id, None)) is not None:
            tally = self.tallies[head]
            tally.drafts += 1
            tally.known += known
            tally.accepted += accepted

    def info(self) -> dict[str, dict[str, int]]:
        """Tallies by head."""
        return {n: dataclasses.asdict(t) for n, t in zip(self.names, self.tallies, strict=True)}
