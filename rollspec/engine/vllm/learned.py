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

import logging
import math
import threading
import time
from typing import Any

import numpy as np
import torch

from rollspec.engine.vllm import specialists
from rollspec.engine.vllm.capture import Capture
from rollspec.engine.vllm.coupled import CoupledSampler
from rollspec.engine.vllm.dedicated import DedicatedTraining
from rollspec.engine.vllm.domains import Domains
from rollspec.engine.vllm.follow import Follower
from rollspec.engine.vllm.hooks import runner_v1 as v1
from rollspec.engine.vllm.online import OnlineTraining
from rollspec.engine.vllm.proposer import VllmProposer
from rollspec.engine.vllm.ranks import NOTHING, Ranks
from rollspec.engine.vllm.shared_noise import SharedNoise
from rollspec.engine.vllm.states import Entry, States
from rollspec.engine.vllm.swap import Swapper
from rollspec.step import Engine

logger = logging.getLogger("rollspec")

KEEP_BYTES = 256 << 20
"""Bytes of the target's hidden states kept for running requests, from which the drafter catches up after it rested and
is rebuilt after its weights were replaced: some 17,000 positions of three layers of width 2,560 in bf16.
"""

REBUILD_TOKENS = 512
"""Positions per step that are read again after a swap: a part of what a prefill step computes."""


class LearnedDrafts:
    """One worker's learned drafter."""

    def __init__(self, bridge: VllmProposer, runner: Any, ranks: Ranks) -> None:
        self.bridge = bridge
        self.ranks = ranks
        self.asleep = False  # the engine's memory is taken away (sleep mode)
        self.reading = threading.Lock()  # held while another thread reads the target's weights; sleep waits for it
        self.runner = runner
        self.drafter = runner.drafter
        self.eagle = bool(self.drafter.pass_hidden_states_to_model)
        self.layers = _aux_layers(runner) if self.eagle else ()
        self.aux_layers = len(self.layers)
        config = runner.speculative_config.draft_model_config
        self.limit = int(getattr(config, "max_model_len", None) or runner.max_model_len)
        width = self.aux_layers * int(runner.model_config.get_hidden_size())
        self.states = States(KEEP_BYTES, int(self.drafter.max_num_tokens), width, runner.dtype.itemsize)
        self.off = False
        self._drained: dict[str, float] = {}
        self.rebuilt = 0  # positions read again after swaps
        self.caught_up = 0  # positions read late, after pauses
        self._ran = 0  # passes of this step
        self._seconds = 0.0
        self._late = 0.0  # of these, to read what it had missed
        self.probs: list[torch.Tensor] = []  # per pass, what the drafter gave its token, [requests]
        self.swapper: Swapper | None = None
        self.online: OnlineTraining | DedicatedTraining | None = None
        self.domains: Domains | None = None
        self.follower: Follower | None = None
        self.noise: SharedNoise | None = None
        if isinstance(bridge.coupled, CoupledSampler) and bridge.config.coupled.drafts == "noise":
            self.noise = SharedNoise(bridge.coupled)
        self.capture: Capture | None = None
        if self.eagle and bridge.drafting and bridge.config.drafter.captures:
            self.capture = Capture(self)
        self.specialists = specialists.of(self.drafter)
        if self.specialists is not None:
            self.specialists.attach(self)
        self.proposer.scored = self._scored
        self._propose = v1.ProposeDrafts.put(runner, self.propose, __name__)
        self._take = v1.TakeDrafts.put(runner, self.take, __name__)
        self._greedy = v1.GreedySample.put(self.drafter, self.sample, __name__)

    def _scored(self, req_id: str, hits: int, length: int) -> None:
        """A draft was scored: news for the canary of new weights, if the request's KV is theirs."""
        if self.specialists is not None:
            self.specialists.scored(req_id, hits, length)
        if self.swapper is None or self.swapper.canary is None or not self.states.current(req_id):
            return
        try:
            self.swapper.observe(hits, length)
        except Exception as e:  # rolling weights back failed: the drafter must rest
            self.fail("swap", e)

    @property
    def proposer(self) -> Engine:
        """The step's side."""
        return self.bridge.proposer

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
        # Before `decide`: it asks who drafted what was just verified.
        rows = self._rows(tokens, spec_decode_metadata, common)
        starts = {q: int(n) for q, n in zip(req_ids, self.runner.input_batch.num_computed_tokens_cpu, strict=False)}
        if self.capture is not None and aux is not None:
            self.capture.step(req_ids, starts, tokens, rows, aux)
        if self.domains is not None:
            running = [[] if self.bridge.ended(q) else t for q, t in zip(req_ids, tokens, strict=True)]
            self.domains.observe(req_ids, running, self.bridge.scheduled)
        if aux is not None:
            aux = aux[: self.aux_layers]
        wanted = self.bridge.decide(self.bridge.result(tokens))
        passes = self._agree(-1 if self.off or self.bridge.fault else wanted)
        self._ran, self.probs, self._seconds = 0, [], 0.0
        nothing: list[list[int]] = [[] for _ in tokens]
        if passes < 0:
            return nothing
        try:
            self._note(req_ids, starts, rows, aux)
            passes = max(0, min(passes, self.limit - int(common.max_seq_len)))
            if not passes and not self.states.full:
                return nothing
            begin = time.perf_counter()
            repaired = self._repair(req_ids, starts, common, sampling_metadata)
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

    def target_parts(self) -> dict[str, torch.Tensor]:
        """The target's embedding, last norm and LM head, which the head in training uses; all ranks must call it."""
        target = self.runner.get_model()
        inner = getattr(target, "model", target)
        modules = {"embed": inner.embed_tokens, "norm": inner.norm, "lm_head": getattr(target, "lm_head", None)}
        weights = {n: getattr(m, "weight", None) for n, m in modules.items()}
        split = {n: w.detach() for n, w in weights.items() if w is not None}
        return {n: w if n == "norm" else self.ranks.gather(w) for n, w in split.items()}

    def info(self) -> dict[str, Any]:
        """What runs, what was swapped, captured and trained."""
        out = self.swapper.info() if self.swapper is not None else {}
        out |= {"off": self.off, "caught_up": self.caught_up, "reread": self.rebuilt}
        if self.capture is not None:
            out["capture"] = self.capture.info()
        if self.online is not None:
            out["training"] = self.online.info()
        if self.follower is not None:
            out["following"] = self.follower.info()
        if self.specialists is not None:
            out["specialists"] = self.specialists.info()
        return out

    def drain(self) -> tuple[dict[str, float], dict[str, float]]:
        """Counts since the last call, and levels, by the names of `rollspec.telemetry.metrics`."""
        sums: dict[str, float] = {"caught_up": self.caught_up, "reread": self.rebuilt}
        levels: dict[str, float] = {}
        if (s := self.swapper) is not None:
            pauses, s.deployment.pauses = s.deployment.pauses, []
            sums |= {k: float(v) for k, v in s.counts.items()}
            levels = {"version": s.version, "staleness": self.bridge.proposer.version - s.since}
            if pauses:
                levels["swap_longest"] = max(pauses)
        if (reached := self.proposer.reached) is not None:
            levels["accept_length"] = reached
        if self.capture is not None:
            counts = self.capture.counts
            sums |= {"captured": counts["samples"], "capture_dropped": counts["dropped"]}
            sums["capture_seconds"] = self.capture.seconds
        if self.online is not None:
            t = self.online.info()
            before = dict(zip(("steps", "tokens"), self.online.resumed, strict=True))
            sums |= {f"train_{k}": t[k] - n for k, n in before.items() if k in t}
            names = ("idle_seconds", "harvested_seconds", "wasted_seconds", "preempted")
            sums |= {k: t[k] for k in (*names, "sent", "sent_bytes", "feedback_dropped", "private") if k in t}
            if "away" in t:
                levels["away"] = float(t["away"] is not None)
            if t.get("loss") is not None:
                levels |= {"loss": t["loss"], "buffered": t["samples"], "train_length": t["length"]}
                levels |= {f"loss/{term}": value for term, value in t["terms"].items()}
            waits = ("preempt_seconds", "preempt_p99_seconds", "micro_step_seconds", "step_age_seconds")
            levels |= {k: t[k] for k in waits if k in t}
        out = {k: v - self._drained.get(k, 0.0) for k, v in sums.items()}
        self._drained = sums
        if self.swapper is not None and pauses:
            out |= {"swaps": len(pauses), "swap_seconds": sum(pauses)}
        return out, levels

    def before_step(self, ended: Any, computes: bool) -> None:
        """A step begins; `ended`: requests that did since the last one. Never raises.

        `computes` is False for the step after the last one, which only tells that requests ended.
        """
        if self.online is not None and computes:
            self.online.step_begins()
        for req_id in ended:
            self.states.drop(req_id)
            if self.domains is not None:
                self.domains.forget(req_id)
            if self.capture is not None:
                self.capture.finish(req_id, self.proposer.requests.get(req_id))
        if self.swapper is not None:
            try:
                if self.specialists is not None and self.specialists.woke:
                    self.specialists.restore()
                self.swapper.poll()
            except Exception as e:  # the drafter may be half of one version and half of another: it must rest
                self.fail("swap", e)

    def fail(self, what: str, error: BaseException) -> None:
        """The learned drafter is off from now on; suffix drafts go on."""
        self.off = True
        self.proposer.resting = True
        cause = f"{what}: {type(error).__name__}: {error}"
        self.bridge.faults[cause] = self.bridge.faults.get(cause, 0) + 1
        logger.error("rollspec: the learned drafter is off from now on (%s).", cause, exc_info=error)

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

    def _note(
        self, req_ids: list[str], starts: dict[str, int], rows: list[tuple[int, int]], aux: list[torch.Tensor] | None
    ) -> None:
        """Keep the hidden states of what the target just computed and did not reject."""
        states = None
        if aux is not None:
            index = gather(rows).to(aux[0].device)
            states = torch.cat([h[index] for h in aux], dim=-1)  # [sum of counts, A*H]
        at = 0
        for req_id, (_, n) in zip(req_ids, rows, strict=True):
            self.states.add(req_id, starts[req_id], n if states is None else states[at : at + n])
            at += n
        self.states.trim()

    def _repair(self, req_ids: list[str], starts: dict[str, int], common: Any, sampling_metadata: Any) -> bool:
        """Read what went by while the drafter rested, and some of what older weights wrote; whether there was any."""
        late = list(self.states.unread(req_ids, starts))
        again = list(self.states.stale(req_ids, REBUILD_TOKENS))
        # A draft model reads one token more per row, and a request may have a row of each kind.
        room = max(1, int(self.drafter.max_num_tokens) - 2 * len(req_ids))
        batch: list[tuple[int, Entry, int, int]] = []
        used = 0
        for i, entry, start, stop in [*late, *again]:
            while start < stop:
                if used >= room:
                    self._read(batch, common, sampling_metadata)
                    batch, used = [], 0
                n = min(stop - start, room - used)
                batch.append((i, entry, start, start + n))
                used, start = used + n, start + n
        if batch:
            self._read(batch, common, sampling_metadata)
        self.caught_up += sum(stop - start for _, _, start, stop in late)
        self.rebuilt += sum(stop - start for _, _, start, stop in again)
        for _, entry, _, stop in again:
            entry.fresh = stop
        return bool(batch)

    def _read(self, batch: list[tuple[int, Entry, int, int]], common: Any, sampling_metadata: Any) -> None:
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

    def _agree(self, passes: int) -> int:
        """Ranks compute the drafter together, so all take the output rank's decisions: passes, swaps, verdicts."""
        if self.ranks.alone:
            return passes
        swapper = self.swapper
        passes, note = self.ranks.decide(passes, swapper.note() if swapper is not None else NOTHING)
        if note.kind and swapper is not None:
            try:
                swapper.apply(note)
            except Exception as e:  # rolling weights back failed: the drafter must rest
                self.fail("swap", e)
        return passes


def gather(rows: list[tuple[int, int]]) -> torch.Tensor:
    """Indices of [start, start + n) of every (start, n), one after the other. Shape [sum of n]."""
    starts, counts = np.array(rows, dtype=np.int64).T
    before = np.cumsum(counts) - counts
    return torch.from_numpy(np.repeat(starts - before, counts) + np.arange(int(counts.sum())))


def _aux_layers(runner: Any) -> tuple[int, ...]:
    """Layers whose hidden states the head reads, in its order; without the one that capture adds."""
    given = runner._get_eagle3_aux_layers_from_config()
    given = getattr(runner, "_rollspec_aux_layers", None) or given
    return tuple(given or runner.model.get_eagle3_default_aux_hidden_state_layers())
