"""Further heads beside the general one, each for a domain; the surest of them drafts for a request.

TAPS (arXiv 2603.27027) trains drafters on the text of one task each and finds that choosing between them by confidence
at inference beats averaging their weights. Here all heads read every step, each into a KV cache of its own, and propose
for every request; per request and step the chain goes on whose cumulative probabilities, as its drafter gives them, sum
highest: the tokens that it expects to be accepted. A pass of S heads costs S passes, which the router is told as it
measures them. What is chosen is a one-hot draft, so any choice is exact.

The general head is the one that is trained and swapped; specialists stay as they were loaded.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rollspec.engine.vllm.payload import fingerprint, read_folder

if TYPE_CHECKING:
    from rollspec.engine.vllm.learned import LearnedDrafts

logger = logging.getLogger("rollspec")

GENERAL = "general"
ATTRIBUTE = "_rollspec_specialists"


def arrange(drafter: Any, folders: Mapping[str, str]) -> None:
    """Have vLLM's proposer load the heads in `folders` (by domain) after its own, before the KV cache is laid out."""
    load_model = drafter.load_model

    def load_all(target_model: Any) -> None:
        load_model(target_model)
        setattr(drafter, ATTRIBUTE, Specialists(drafter, target_model, folders))

    drafter.load_model = load_all


def of(drafter: Any) -> Specialists | None:
    """The specialists that were loaded with a proposer, if any were."""
    found: Specialists | None = getattr(drafter, ATTRIBUTE, None)
    return found if found is not None and len(found.models) > 1 else None


@dataclasses.dataclass(slots=True)
class Tally:
    """What one head's chains came to: chosen, judged and right tokens."""

    chains: int = 0
    judged: int = 0
    right: int = 0


class Specialists:
    """All heads of one worker. `models[0]` is vLLM's own; a head that cannot be loaded is left out, and said to be."""

    def __init__(self, drafter: Any, target_model: Any, folders: Mapping[str, str]) -> None:
        self.drafter = drafter
        self.names = [GENERAL]
        self.models = [drafter.model]
        self.tallies = [Tally()]
        self.woke = False
        self._folders: list[Path | None] = [None]
        self._prints: list[list[float]] = [[]]
        self._served: dict[str, int] = {}  # head of each request's latest chain
        self._learned: LearnedDrafts | None = None
        for name, folder in folders.items():
            try:
                self._load(name, folder, target_model)
            except Exception as e:  # the others go on
                logger.warning("rollspec: the specialist %r (%s) is left out (%s).", name, folder, e)
            finally:
                drafter.model = self.models[0]

    def _load(self, name: str, folder: str, target_model: Any) -> None:
        from vllm.compilation.backends import set_model_tag
        from vllm.model_executor.model_loader import get_model

        drafter, number = self.drafter, len(self.models)
        if drafter.use_local_argmax_reduction or drafter.use_heterogeneous_vocab:
            raise ValueError("this engine's drafter tells no probabilities to choose by")
        # Same shape, other weights: `heads.settle` has compared the two.
        config = copy.copy(drafter.speculative_config.draft_model_config)
        config.model = folder
        context = drafter.vllm_config.compilation_config.static_forward_context
        before = set(context)
        try:
            with set_model_tag(f"eagle_head_{number}"):
                model = get_model(
                    vllm_config=drafter._create_draft_vllm_config(), model_config=config, prefix=f"specialist_{number}",
                    load_config=drafter.speculative_config.draft_load_config,
                )  # fmt: skip
            drafter.model = model
            drafter._maybe_share_embeddings(target_model)
            drafter._maybe_share_lm_head(target_model)
        except BaseException:
            for layer in set(context) - before:
                del context[layer]
            raise
        # Its attention layers get a cache of their own, beside the general head's and under the same block table.
        added = {n for n in set(context) - before if hasattr(context[n], "get_kv_cache_spec")}
        drafter._draft_attn_layer_names |= added
        self.models.append(model)
        self.names.append(name)
        self.tallies.append(Tally())
        self._folders.append(Path(folder))
        self._prints.append(fingerprint(self._own(model, target_model)))
        self._target = target_model

    def attach(self, learned: LearnedDrafts) -> None:
        """All heads run wherever vLLM's proposer would run its own."""
        self._learned = learned
        self._propose, self._dummy_run = self.drafter.propose, self.drafter.dummy_run
        self.drafter.propose, self.drafter.dummy_run = self.propose, self.dummy_run

    def propose(self, **given: Any) -> torch.Tensor:
        """In the place of the proposer's `propose`: for each request the surest head's row, [requests, passes]."""
        assert self._learned is not None
        common, learned = given.pop("common_attn_metadata"), self._learned
        rows, probs = [], []
        try:
            for model in self.models:
                self.drafter.model = model
                learned.begin_passes()
                # vLLM moves these tensors on from pass to pass.
                rows.append(self._propose(**given, common_attn_metadata=_own_tensors(common)))
                probs.append(learned.probs)
        finally:
            self.drafter.model = self.models[0]
        if not probs[0]:  # no passes: the heads only read
            learned.begin_passes()
            first: torch.Tensor = rows[0]
            return first
        each = torch.stack([torch.stack(p, dim=1) for p in probs])  # [heads, requests, passes]
        best = each.cumprod(-1).sum(-1).argmax(0)  # [requests]
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
                self.drafter.model = model
                self._dummy_run(*args, **kwargs)
        finally:
            self.drafter.model = self.models[0]

    def scored(self, req_id: str, hits: int, judged: int) -> None:
        """A request's latest chain was judged."""
        if judged and (head := self._served.pop(req_id, None)) is not None:
            tally = self.tallies[head]
            tally.chains += 1
            tally.judged += judged
            tally.right += hits

    def verify(self) -> None:
        """The engine woke up: heads whose memory was lost are loaded again, and left out where that fails."""
        from rollspec.engine.vllm.patches.cpu_weights import repack

        self.woke = False
        for i in range(len(self.models) - 1, 0, -1):
            own = self._own(self.models[i], self._target)
            if fingerprint(own) == self._prints[i]:
                continue
            folder = self._folders[i]
            try:
                assert folder is not None
                self.models[i].load_weights(iter(read_folder(folder).items()))
                repack(self.models[i])
                if fingerprint(own) != self._prints[i]:
                    raise ValueError("its weights are others than they were")
            except Exception as e:
                logger.warning("rollspec: the specialist %r is left out (%s).", self.names[i], e)
                for column in (self.models, self.names, self.tallies, self._folders, self._prints):
                    del column[i]

    def info(self) -> dict[str, dict[str, int]]:
        """Tallies by head."""
        return {n: dataclasses.asdict(t) for n, t in zip(self.names, self.tallies, strict=True)}

    @staticmethod
    def _own(model: Any, target_model: Any) -> list[torch.Tensor]:
        """Weights that a head does not share with the target."""
        shared = {id(p) for p in target_model.parameters()}
        return [p for p in model.parameters() if id(p) not in shared and p.numel()]


def _own_tensors(common: Any) -> Any:
    """vLLM's metadata with copies of its tensors, but for the block table, which nobody writes."""
    copies = {
        f.name: value.clone()
        for f in dataclasses.fields(common)
        if isinstance(value := getattr(common, f.name), torch.Tensor) and f.name != "block_table_tensor"
    }
    return dataclasses.replace(common, **copies)
