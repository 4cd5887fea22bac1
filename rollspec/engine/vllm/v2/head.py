"""The draft head on the V2 runner: decided after every step how many passes it runs, or that it rests.

It needs the tokens that the step just sampled, so a step with a head waits for the device here: no pass is
queued before it is decided on.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import torch

from rollspec.drafting.requests import StepResult
from rollspec.engine.bridge import Bridge
from rollspec.engine.vllm import specialists
from rollspec.engine.vllm.v2.layers import LAYERS
from rollspec.engine.vllm.v2.speculator_run import SpeculatorRun
from rollspec.head import metadata
from rollspec.head.draft_head import DraftHead
from rollspec.head.ranks import Ranks

ARGUMENTS = ("attn_metadata", "slot_mappings", "last_hidden_states", "aux_hidden_states", "num_sampled", "num_rejected")
"""Of `DraftModelSpeculator.propose` after the batch, in order; there are more."""


class RunnerDraftHead(DraftHead):
    """One worker's draft head. Its `drafter` runs it."""

    def __init__(self, bridge: Bridge, runner: Any, ranks: Ranks, drafter: SpeculatorRun) -> None:
        given = getattr(runner.speculator, LAYERS, None)
        layers = given or () if drafter.reads_states else ()
        super().__init__(bridge, runner, ranks, drafter, layers, last=not drafter.reads_states and given is not None)
        self._read: Callable[..., Any] = drafter.read
        self.specialists = specialists.of(runner.speculator)
        if self.specialists is not None:
            by_domain = bridge.config.proposal.head.route == "domain"
            self.specialists.attach(drafter.probs, self._domain_of if by_domain else None)
            self._read = functools.partial(self.specialists.each, drafter.read)
            if self.capture is not None:
                self.capture.by_another = self.specialists.drafted

    def _domain_of(self, req_id: str) -> str:
        return metadata.of_running(self.bridge.running, req_id).domain

    def drafts(
        self, step: StepResult, batch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[list[int]] | None, list[list[float]] | None]:
        """What the head drafts after `step`: rows [requests][passes] and their probabilities; None where it rests.

        Args:
            args, kwargs: of vLLM's `propose`, after the batch.
        """
        given = dict(zip(ARGUMENTS, args, strict=False)) | kwargs
        aux = given["aux_hidden_states"]
        req_ids = list(batch.req_ids)
        first = batch.query_start_loc[: batch.num_reqs]
        where, begin = batch.query_start_loc_np.tolist(), batch.positions[first.long()].tolist()
        rejected = given["num_rejected"].tolist()
        rows = [(where[i], where[i + 1] - where[i] - rejected[i]) for i in range(batch.num_reqs)]
        starts = dict(zip(req_ids, begin, strict=True))
        self.observe(req_ids, starts, step.sampled, rows, aux)
        passes = self.plan(step)
        if passes < 0:
            return None, None
        try:
            read = [given["last_hidden_states"]] if self.drafter.reads_output else (aux or [])[: self.aux_layers]
            self.keep(req_ids, starts, rows, read or None)
            longest = max(start + n for start, (_, n) in zip(begin, rows, strict=True))
            passes = max(0, min(passes, self.limit - longest))
            if not passes and not self.drafter_kv.full:
                return None, None
            started = time.perf_counter()
            repaired = self.repair(req_ids, starts, functools.partial(self._read, batch), self.drafter.max_num_reqs)
            # On a GPU this time is only known together with that of the passes: then none of it says what a pass costs.
            on_cpu = self.runner.device.type == "cpu"
            late = time.perf_counter() - started if on_cpu else math.inf if repaired else 0.0
            tokens, probs = self.drafter.propose(passes, batch, *args, **kwargs)
            self.drafter_kv.read(req_ids)
            if not passes:
                return None, None
            out = tokens[:, :passes].tolist(), probs[:, :passes].tolist()
            self.engine.passed(passes, time.perf_counter() - started, batch.num_reqs, late)
            return out
        except Exception as e:  # the target's sample is made; without drafts it is as good
            self.fail("drafts of the head", e)
            return None, None

    def look(self, apply: Callable[..., torch.Tensor], logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Around `Sampler.apply_sampling_params`: capture sees the logits as the target and the grammars left them.

        Of a batch that is verified in parts capture sees the last part.
        """
        given = dict(zip(("slots", "idx_mapping", "idx_mapping_np"), args, strict=False)) | kwargs
        if self.capture is not None:
            req_ids = [self.runner.req_states.index_to_req_id.get(i, "") for i in given["idx_mapping_np"].tolist()]
            verified = [len(self.bridge.scheduled.get(r, ())) for r in req_ids]
            self.capture.look(logits, req_ids, verified if any(verified) else ())
        return apply(logits, *args, **kwargs)

    def end(self) -> None:
        """The step is over."""
        if self.capture is not None:
            self.capture.end()
        if self.training is not None:
            self.training.step_ended()
