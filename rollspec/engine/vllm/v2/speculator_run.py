"""vLLM's own speculator (EAGLE-3 head, MTP layer or draft model) run on request: passes, or reads of what it missed.

The V2 runner's speculators draft after every step, for every request, k tokens, which keeps their KV in step with the
target's. `SpeculatorRun.propose` runs the passes that a step asks for and keeps the probability of each token;
`SpeculatorRun.read` writes the KV of positions that went by without it.

    EAGLE-3      reads (hidden states of the target at p, token at p + 1) at position p
    MTP          reads (output of the target at p, token at p + 1) at position p
    draft model  reads the token at p at position p
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rollspec.engine.noise_keys import GREEDY
from rollspec.engine.vllm.hooks import table as v2
from rollspec.head.draft_head import Span


class SpeculatorRun:
    """One runner's speculator.

    Args:
        speculator: vLLM's (vllm/v1/worker/gpu/spec_decode/speculator.py, `DraftModelSpeculator`).
        run: its `propose` as vLLM made it.
        runner: the model runner.
        noise: whether drafts are drawn with the noise that the target draws with, rather than greedily; asked in every
            pass that is not replayed from a graph.
    """

    def __init__(
        self, speculator: Any, run: Callable[..., torch.Tensor], runner: Any, noise: Callable[[], bool]
    ) -> None:
        self.speculator = speculator
        self.draft_model_config = speculator.draft_model_config
        self.max_num_tokens = int(speculator.max_num_tokens)
        self.max_num_reqs = int(speculator.max_num_reqs)
        method = runner.speculative_config.method
        self.reads_states = method in ("eagle3", "mtp")
        self.reads_output = method == "mtp"  # of the target, after its last norm
        self._run = run
        self._runner = runner
        self._noise = noise
        self._draw = v2.SampleDraft.put(speculator, self.sample, __name__)
        self._batch: Any = None
        # Written by column inside CUDA graphs, too: its address stays.
        shape = (self.max_num_reqs, int(speculator.num_speculative_steps))
        self.probs = torch.zeros(shape, dtype=torch.float32, device=speculator.device)
        self._slots: torch.Tensor | None = None  # of the positions that `read` writes

    @property
    def model(self) -> Any:
        """The draft model."""
        return self.speculator.model

    def _get_model(self) -> Any:
        """A second draft model, as vLLM loads it."""
        return self.speculator.load_draft_model(self._runner.get_model(), set())

    def propose(self, passes: int, batch: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Run `passes` passes; 0 only writes the KV of the step.

        Returns:
            tokens and what the drafter gave each of them, both [requests, k], of which `passes` columns are valid.
        """
        speculator = self.speculator
        self._batch = batch
        # `StandaloneARSpeculator` runs as many passes as it has steps.
        steps = speculator.num_speculative_steps if self.reads_states else max(1, passes)
        with v2.DraftSteps.during(speculator, steps):
            tokens = self._run(batch, *args, **{**kwargs, "num_speculative_tokens": passes})
        return tokens, self.probs[: batch.num_reqs]

    def sample(
        self,
        hidden_states: torch.Tensor,
        positions: torch.Tensor,
        idx_mapping: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        draft_step: torch.Tensor,
        draft_logits: torch.Tensor | None,
        spec_step_idx: int = 0,
        **more: Any,
    ) -> torch.Tensor:
        """In the place of `DraftModelSpeculator.sample_draft`: the same tokens, or the ones that the target's noise
        makes likeliest; and how sure the drafter was of them.

        Args:
            hidden_states: the drafter's, [requests, H]. positions: that the target draws from, [requests].
            idx_mapping: slots of the requests; -1 is padding. temperature, seeds: by slot.
            draft_step: the pass, from 0, on the device. more: what later versions add.
        """
        speculator = self.speculator
        if draft_logits is not None or speculator.use_local_argmax_reduction:
            given = (positions, idx_mapping, temperature, seeds, draft_step, draft_logits, spec_step_idx)
            return self._draw(hidden_states, *given, **more)  # type: ignore[no-any-return]
        offsets = None
        if self._noise():
            logits = speculator.compute_draft_logits(hidden_states, spec_step_idx).float()
            tokens, logits = self._coupled(logits, positions, idx_mapping, temperature, seeds)
        else:
            logits, offsets = self._logits(hidden_states, spec_step_idx)
            tokens = logits.argmax(-1)
        chosen = logits.gather(-1, tokens.clamp(0, logits.shape[-1] - 1)[:, None])[:, 0]
        if offsets is not None:
            tokens = tokens + offsets[tokens]
        probs = (chosen - logits.logsumexp(-1)).exp()
        self.probs[: len(probs)].index_copy_(1, draft_step.view(1), probs[:, None])
        return tokens

    def _logits(self, hidden_states: torch.Tensor, spec_step_idx: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [requests, tokens that the head can draft], and what to add to each of these ids for the target's.

        vLLM's own are spread over the target's vocabulary, mostly -inf: with a draft vocabulary of a sixth of it more
        than half of a pass on a CPU.
        """
        model = self.model
        offsets = getattr(model, "draft_id_to_target_id", None)
        if offsets is None or not self.reads_states:
            return self.speculator.compute_draft_logits(hidden_states, spec_step_idx).float(), None
        return model.logits_processor(model.lm_head, hidden_states).float(), offsets

    def _coupled(
        self,
        logits: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One token per row [n, vocab] by the target's own noise, and the logits that it was drawn from.

        Where drafter and target agree the drafts are accepted, else at least as often as (1 - d) / (1 + d), d being the
        total variation of the two (Daliri et al., arXiv:2408.07978).
        """
        from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

        each = temperature[slots]
        scores = logits / torch.where(each < GREEDY, 1.0, each)[:, None]
        states = self._runner.sampler.sampling_states
        if self._batch is not None and len(self._batch.idx_mapping_np) == len(scores):
            scores = states.apply_top_k_top_p(scores, slots, self._batch.idx_mapping_np)
        fp64 = self.speculator.use_fp64_gumbel
        return gumbel_sample(scores, slots, temperature, seeds, positions, False, False, use_fp64=fp64), scores

    def read(self, batch: Any, spans: list[Span]) -> None:
        """One pass over positions of some rows of `batch`: it writes the drafter's KV there and drafts nothing.

        The buffers of the step are written over; the next `propose` fills them anew, and the step's block tables are
        put back.
        """
        from vllm.config.compilation import CUDAGraphMode
        from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
        from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

        speculator, tables = self.speculator, self.speculator.block_tables
        device, buffers = speculator.device, speculator.input_buffers
        lengths = np.array([stop - start for _, _, start, stop in spans], dtype=np.int32)
        begins = np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)])
        ends = torch.tensor([stop for *_, stop in spans], dtype=torch.int32)
        n, total = len(spans), int(begins[-1])
        slots = batch.idx_mapping[torch.tensor([i for i, *_ in spans], device=device)]
        positions = torch.cat([torch.arange(a, b) for _, _, a, b in spans]).to(device)
        owners = slots[torch.repeat_interleave(torch.arange(n), torch.from_numpy(lengths).long()).to(device)]
        tokens = self._runner.req_states.all_token_ids.gpu[owners, positions + int(self.reads_states)].to(torch.int32)

        buffers.query_start_loc[: n + 1] = torch.from_numpy(begins).to(device)
        buffers.query_start_loc[n + 1 :] = total
        buffers.seq_lens[:n] = ends.to(device)
        buffers.seq_lens[n:] = 0
        buffers.positions[:total] = positions
        tables.gather_block_tables(slots, num_reqs_padded=n)
        if self._slots is None:
            self._slots = torch.empty(tables.num_kv_cache_groups, self.max_num_tokens, dtype=torch.int64, device=device)
        where = tables.compute_slot_mappings(slots, buffers.query_start_loc[: n + 1], positions, total, out=self._slots)
        speculator.draft_max_seq_len = speculator.max_model_len
        attention = speculator._build_attn_metadata(
            num_reqs=n,
            batch_desc=BatchExecutionDescriptor(cg_mode=CUDAGraphMode.NONE, num_tokens=total, num_reqs=n),
            query_start_loc_np=begins,
            seq_lens_cpu_upper_bound=ends,
            step=0,
            slot_mappings=where,
        )
        by_layer = build_slot_mappings_by_layer(where, speculator.kv_cache_config)
        if self.reads_states:
            parts = [entry.rows(a, b) for _, entry, a, b in spans]
            states = torch.cat([p for p in parts if p is not None])  # [total, A*H]
            buffers.input_ids[:total] = tokens
            speculator.hidden_states[:total] = states if self.reads_output else self.model.combine_hidden_states(states)
            speculator._run_model(total, attention, by_layer, None)
        else:
            speculator._run_model(tokens, positions, attention, by_layer, None)
        tables.gather_block_tables(batch.idx_mapping, num_reqs_padded=batch.num_reqs_after_padding)
