"""Runs vLLM's own proposer (an EAGLE-3 head, or a draft model) when the router asks for it, and keeps its KV in step.

vLLM's proposer drafts after every step, for every request, K tokens. Here `Engine.prepare` decides first, from the
tokens that were just sampled, whether anybody wants it and for how many passes:

    passes > 0   it runs; its rows go to `take_draft_token_ids`, where each request gets them or its suffix draft
    passes = 0   it does not; the target's hidden states of the step are kept, and read in one pass when it resumes

A pause therefore costs one pass at its end instead of one per step; when the states kept exceed their bound it runs
once without drafting. Rows of different drafters may have any length up to num_speculative_tokens: the scheduler takes
them as they are. Synchronous scheduling only (asynchronous scheduling leaves drafts on the device).
"""

from __future__ import annotations

import functools
import math
import time
from typing import Any

import torch

from rollspec.engine.vllm.coupled import CoupledSampler
from rollspec.engine.vllm.head import DraftHead, Span
from rollspec.engine.vllm.hooks import runner_v1 as v1
from rollspec.engine.vllm.proposer import VllmProposer
from rollspec.engine.vllm.ranks import Ranks
from rollspec.engine.vllm.shared_noise import SharedNoise


class LearnedDrafts(DraftHead):
    """One worker's learned drafter in vLLM's first model runner."""

    def __init__(self, bridge: VllmProposer, runner: Any, ranks: Ranks) -> None:
        drafter = runner.drafter
        layers = _aux_layers(runner) if drafter.pass_hidden_states_to_model else ()
        super().__init__(bridge, runner, ranks, drafter, layers)
        self._ran = 0  # passes of this step
        self._seconds = 0.0
        self._late = 0.0  # of these, to read what it had missed
        self.probs: list[torch.Tensor] = []  # per pass, what the drafter gave its token, [requests]
        self.noise: SharedNoise | None = None
        if isinstance(bridge.coupled, CoupledSampler) and bridge.config.coupled.drafts == "noise":
            self.noise = SharedNoise(bridge.coupled)
        self._propose = v1.ProposeDrafts.put(runner, self.propose, __name__)
        self._take = v1.TakeDrafts.put(runner, self.take, __name__)
        self._greedy = v1.GreedySample.put(self.drafter, self.sample, __name__)
        if self.capture is not None:
            self._show_logits(self.capture.look)

    def _show_logits(self, look: Any) -> None:
        """Have `look` see every step's logits before they are sampled from, which may write into them."""
        runner = self.runner
        sample = runner._sample

        @functools.wraps(sample)
        def observed(logits: Any, spec_decode_metadata: Any, *args: Any, **kwargs: Any) -> Any:
            drafted = spec_decode_metadata.num_draft_tokens if spec_decode_metadata is not None else ()
            look(logits, runner.input_batch.req_ids, drafted)
            return sample(logits, spec_decode_metadata, *args, **kwargs)

        v1.Sample.put(runner, observed, __name__)

    # ---- vLLM's interface -------------------------------------------------------------------------------------------

    def propose(self, scheduler_output: Any, sampled: Any, *args: Any, **kwargs: Any) -> Any:
        """In the place of `GPUModelRunner.propose_draft_token_ids`: rows [requests, passes], or an empty list each."""
        try:
            return self._step(scheduler_output, sampled, *args, **kwargs)
        except Exception as e:  # degrade, never end the job; what was sampled stands
            self._ran = 0
            self.bridge.fail("drafting", e)
            return [[] for _ in self.runner.input_batch.req_ids]

    def _step(
        self,
        scheduler_output: Any,
        sampled: Any,
        sampling_metadata: Any,
        hidden_states: torch.Tensor,
        sample_hidden_states: torch.Tensor,
        aux: list[torch.Tensor] | None,
        spec_decode_metadata: Any,
        common: Any,
        slot_mappings: Any = None,
    ) -> Any:
        tokens = self._tokens(sampled)
        req_ids = list(self.runner.input_batch.req_ids[: len(tokens)])
        rows = self._rows(tokens, spec_decode_metadata, common)
        starts = {q: int(n) for q, n in zip(req_ids, self.runner.input_batch.num_computed_tokens_cpu, strict=False)}
        self.observe(req_ids, starts, tokens, rows, aux)
        if aux is not None:
            aux = aux[: self.aux_layers]
        passes = self.plan(self.bridge.result(tokens))
        self._ran, self.probs, self._seconds = 0, [], 0.0
        nothing: list[list[int]] = [[] for _ in tokens]
        if passes < 0:
            return nothing
        try:
            self.keep(req_ids, starts, rows, aux)
            passes = max(0, min(passes, self.limit - int(common.max_seq_len)))
            if not passes and not self.states.full:
                return nothing
            begin = time.perf_counter()
            repaired = self.repair(req_ids, starts, lambda spans: self._read(spans, common, sampling_metadata))
            # On a GPU this time is only known together with that of the passes: then none of it says what a pass costs.
            on_cpu = self.runner.device.type == "cpu"
            self._late = time.perf_counter() - begin if on_cpu else math.inf if repaired else 0.0
            if self.noise is not None:
                # Rows that were computed and not rejected, and the token that was sampled after them.
                lengths = [starts[q] + n + 1 for q, (_, n) in zip(req_ids, rows, strict=True)]
                self.noise.begin(req_ids, lengths, sampling_metadata)
            scheduler_output.num_spec_tokens_to_schedule = passes
            drafts = self._propose(
                scheduler_output,
                sampled,
                sampling_metadata,
                hidden_states,
                sample_hidden_states,
                aux,
                spec_decode_metadata,
                common,
                slot_mappings,
            )
            self.states.read(req_ids)
            self._ran, self._seconds = passes, time.perf_counter() - begin
            return drafts if passes else nothing
        except Exception as e:  # the target's sample is made; without drafts it is as good
            self.fail("learned drafts", e)
            return nothing

    def take(self) -> Any:
        """In the place of `GPUModelRunner.take_draft_token_ids`: every request's row, whoever drafted it."""
        begin = time.perf_counter()
        drafts = self._take()
        if drafts is not None:
            try:
                self._finish(drafts, begin)
            except Exception as e:
                self.bridge.fail("drafting", e)
                drafts.draft_token_ids = [[] for _ in drafts.req_ids]
        if self.capture is not None:
            self.capture.end()
        if self.online is not None:
            self.online.step_ended()
        return drafts

    def _finish(self, drafts: Any, begin: float) -> None:
        rows = drafts.draft_token_ids if self._ran else None
        probs = torch.stack(self.probs, dim=1).tolist() if self._ran and self.probs else None
        if self._ran:
            # On a GPU the passes end here: what was queued is waited for.
            waited = time.perf_counter() - begin if self.runner.device.type != "cpu" else 0.0
            self.bridge.passed(self._ran, self._seconds + waited, len(drafts.req_ids), self._late)
        self._ran = 0
        drafts.draft_token_ids = self.bridge.finish(rows, probs, len(drafts.req_ids))

    def sample(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """In the place of the proposer's `_greedy_sample`: the same tokens, or under coupled sampling the ones that its
        noise makes likeliest; and how sure the drafter was of them.
        """
        if self.drafter.use_local_argmax_reduction or self.drafter.use_heterogeneous_vocab:
            return self._greedy(hidden_states)  # type: ignore[no-any-return]
        logits = self.drafter.model.compute_logits(hidden_states)
        drawn = self.noise.draw(logits) if self.noise is not None else None
        if drawn is not None:
            self.probs.append(drawn[1])
            return drawn[0]
        top = logits.max(dim=-1)
        self.probs.append((top.values.float() - logits.float().logsumexp(-1)).exp())
        indices: torch.Tensor = top.indices
        return indices

    def begin_passes(self) -> None:
        """The proposer's passes over this step's rows begin, or begin again with another head."""
        self.probs = []
        if self.noise is not None:
            self.noise.again()

    # ---- the drafter's KV -------------------------------------------------------------------------------------------

    @staticmethod
    def _rows(tokens: list[list[int]], spec: Any, common: Any) -> list[tuple[int, int]]:
        """Where each request's rows begin in the step's tensors, and how many of them were not rejected."""
        where = common.query_start_loc_cpu.tolist()
        drafted = spec.num_draft_tokens if spec is not None else [0] * len(tokens)
        return [
            (where[i], where[i + 1] - where[i] - (drafted[i] + 1 - len(new) if drafted[i] else 0))
            for i, new in enumerate(tokens)
        ]

    def _read(self, batch: list[Span], common: Any, sampling_metadata: Any) -> None:
        """One pass over positions [start, stop) of some rows: it writes the drafter's KV there and drafts nothing."""
        device = self.drafter.device
        token_ids = self.runner.input_batch.token_ids_cpu
        rows = torch.tensor([i for i, *_ in batch])
        lengths = torch.tensor([stop - start for _, _, start, stop in batch], dtype=torch.int32)
        ends = torch.tensor([stop for *_, stop in batch], dtype=torch.int32)
        begins = torch.zeros(len(batch) + 1, dtype=torch.int32)
        torch.cumsum(lengths, 0, out=begins[1:])
        ids = torch.cat([torch.from_numpy(token_ids[i, a:b].copy()) for i, _, a, b in batch])
        following = torch.tensor([int(token_ids[i, b]) for i, _, _, b in batch], dtype=torch.int32)
        positions = torch.cat([torch.arange(a, b) for _, _, a, b in batch])
        table = common.block_table_tensor[rows.to(device)]
        size = int(self.drafter.block_size)
        owner = torch.repeat_interleave(torch.arange(len(batch)), lengths.long())
        slots = table[owner.to(device), (positions // size).to(device)].long() * size + (positions % size).to(device)
        states = None
        if self.eagle:
            parts = [entry.rows(a, b) for _, entry, a, b in batch]
            states = torch.cat([p for p in parts if p is not None])
        # Copies on the host that vLLM 0.29 keeps beside the device's; 0.30 removed them.
        host_copies = {"_seq_lens_cpu": ends.clone(), "_num_computed_tokens_cpu": ends - lengths}
        meta = common.replace(
            query_start_loc=begins.to(device),
            query_start_loc_cpu=begins,
            seq_lens=ends.to(device),
            num_reqs=len(batch),
            num_actual_tokens=int(begins[-1]),
            max_query_len=int(lengths.max()),
            max_seq_len=int(ends.max()),
            block_table_tensor=table,
            slot_mapping=slots,
            seq_lens_cpu_upper_bound=ends.clone(),
            is_prefilling=None,
            positions=None,
            **{name: value for name, value in host_copies.items() if hasattr(common, name)},
            _num_computed_tokens_cache=None,
            _token_to_req_indices_cache=None,
        )
        self.drafter.propose(
            num_speculative_tokens=0,
            target_token_ids=ids.to(device, torch.int32),
            target_positions=positions.to(device),
            target_hidden_states=states,
            next_token_ids=following.to(device),
            token_indices_to_sample=None,
            common_attn_metadata=meta,
            sampling_metadata=sampling_metadata,
        )

    # ---- small things -----------------------------------------------------------------------------------------------

    def _tokens(self, sampled: Any) -> list[list[int]]:
        """What each request said in this step; empty where it is still in its prompt."""
        if isinstance(sampled, list):
            return sampled
        rows = sampled.tolist()
        drop = self.runner.discard_request_mask.np[: len(rows)]
        return [[] if skip else [t for t in row if t >= 0] for row, skip in zip(rows, drop, strict=True)]


def _aux_layers(runner: Any) -> tuple[int, ...]:
    """Layers whose hidden states the head reads, in its order; without the one that capture adds."""
    given = runner._get_eagle3_aux_layers_from_config()
    given = getattr(runner, "_rollspec_aux_layers", None) or given
    return tuple(given or runner.model.get_eagle3_default_aux_hidden_state_layers())
