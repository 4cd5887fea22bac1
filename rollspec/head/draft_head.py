"""One worker's draft head (or draft model): what it read, its versions, its data.

After every step it is decided how many passes the head runs, or that it rests. Before it runs again it reads what it
missed, or read with older weights: a pause costs one pass at its end instead of one per step. It needs the tokens that
the step just sampled, so a step with a head waits for the device: no pass is queued before it is decided on.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from drafter_online.architecture import base_of
from rollspec.drafting.requests import StepResult
from rollspec.head import metadata
from rollspec.head.capture import Capture
from rollspec.head.domains import Domains
from rollspec.head.drafter_kv import DrafterKV, Entry
from rollspec.head.host import Host
from rollspec.head.ranks import Ranks
from rollspec.step import DraftEngine

logger = logging.getLogger("rollspec")

KEEP_BYTES = 256 << 20
"""Bytes of the target's hidden states kept for running requests, from which the drafter catches up after it rested and
is rebuilt after its weights were replaced: some 17,000 positions of three layers of width 2,560 in bf16.
"""

REBUILD_TOKENS = 512
"""Positions per step that are read again after a swap: a part of what a prefill step computes."""

ARGUMENTS = ("attn_metadata", "slot_mappings", "last_hidden_states", "aux_hidden_states", "num_sampled", "num_rejected")
"""Of `DraftModelSpeculator.propose` after the batch, in order; there are more."""

Span = tuple[int, Entry, int, int]
"""(row in the batch, what is kept of its request, first position, position after the last)."""


class DraftHead:
    """The head of one model runner.

    Args:
        drafter: runs it (engine/vllm/v2/speculator_run.py, `SpeculatorRun`).
        layers: of the target, whose hidden states the head reads, in its order; none for a draft model that is trained,
            which needs its last layer's alone; None where nothing is to be trained.
        specialists: further heads by domain, which run beside the first (engine/vllm/specialists.py), if there are any.
    """

    def __init__(
        self, bridge: Host, runner: Any, ranks: Ranks, drafter: Any, layers: tuple[int, ...] | None, specialists: Any
    ) -> None:
        self.bridge = bridge
        self.runner = runner
        self.ranks = ranks
        self.drafter = drafter
        self.layers = layers or ()
        self.aux_layers = len(self.layers) or int(drafter.reads_output)
        self.trainable = layers is not None
        self.asleep = False  # the engine's memory is released (sleep mode)
        # What a swap and the weights that it exchanges need of this.
        self.vllm_config, self.device = runner.vllm_config, runner.device
        self.draft_model, self.target_model = drafter.model, runner.get_model()
        self.draft_folder = str(drafter.draft_model_config.model)
        assert bridge.engine.head is not None  # the plugin chose vLLM's speculator by the drafter that is named
        self.acceptance = bridge.engine.head.acceptance
        self.second_model = drafter._get_model
        self.reading = threading.Lock()  # held while another thread reads the target's weights; sleep waits for it
        self.limit = int(runner.speculative_config.draft_model_config.max_model_len)
        width = self.aux_layers * int(runner.model_config.get_hidden_size())
        self.drafter_kv = DrafterKV(KEEP_BYTES, int(drafter.max_num_tokens), width, runner.dtype.itemsize)
        self.rewind = self.drafter_kv.rewind
        self.off = False
        self.rebuilt = 0  # positions read again after swaps
        self.caught_up = 0  # positions read late, after pauses
        self.swapper: Any  # a `Swapper`, given before the first step
        self.training: Any = None  # a `HeadTraining`
        self.domains: Domains | None = None
        self._read: Callable[..., Any] = drafter.read
        self.specialists = specialists
        self.capture: Capture | None = None
        if self.trainable and bridge.drafting and bridge.config.drafter.captures:
            self.capture = Capture(bridge, runner, self.layers)
        if specialists is not None:
            by_domain = bridge.config.proposal.head.route == "domain"
            specialists.attach(drafter.probs, self._domain_of if by_domain else None)
            self._read = functools.partial(specialists.each, drafter.read)
            if self.capture is not None:
                self.capture.by_another = specialists.drafted
        self.engine.scored = self._scored
        self._drained: dict[str, float] = {}

    def _domain_of(self, req_id: str) -> str:
        return metadata.of_running(self.bridge.running, req_id).domain

    def _scored(self, req_id: str, accepted: int, length: int) -> None:
        """A draft was scored: news for the canary of new weights, if the request's KV is theirs."""
        if self.specialists is not None:
            self.specialists.scored(req_id, accepted, length)
            if self.specialists.drafted(req_id):
                return
        if self.swapper.canary is None or not self.drafter_kv.current(req_id):
            return
        try:
            self.swapper.observe(accepted, length)
        except Exception as e:  # rolling weights back failed: the drafter must rest
            self.fail("swap", e)

    @property
    def engine(self) -> DraftEngine:
        """The step's side."""
        return self.bridge.engine

    @property
    def base(self) -> str:
        """Of the target's configuration."""
        return base_of(self.runner.model_config.hf_text_config)

    # ---- the step ---------------------------------------------------------------------------------------------------

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

    def observe(
        self, req_ids: list[str], starts: dict[str, int], tokens: list[list[int]], rows: list[tuple[int, int]], aux: Any
    ) -> None:
        """The target computed a step. Arguments as of `Capture.step`; call it before `plan`, which forgets the drafts
        that were just verified.
        """
        if self.capture is not None and aux is not None:
            self.capture.step(req_ids, starts, tokens, rows, aux)
        if self.domains is not None:
            running = [[] if self.bridge.ended(q) else t for q, t in zip(req_ids, tokens, strict=True)]
            self.domains.observe(req_ids, running, self.bridge.scheduled)

    def plan(self, step: StepResult) -> int:
        """Passes of this step on every rank; -1 where the head is off.

        Ranks compute the drafter together, so all take the output rank's decisions: passes, swaps, verdicts.
        """
        passes = self.bridge.decide(step)
        if self.off or self.bridge.fault:
            passes = -1
        if self.ranks.alone:
            return passes
        passes, note = self.ranks.decide(passes, self.swapper.note())
        if note.kind:
            try:
                self.swapper.apply(note)
            except Exception as e:  # rolling weights back failed: the drafter must rest
                self.fail("swap", e)
        return passes

    def keep(
        self, req_ids: list[str], starts: dict[str, int], rows: list[tuple[int, int]], aux: list[torch.Tensor] | None
    ) -> None:
        """Keep the hidden states of what the target just computed and did not reject."""
        states = None
        if aux is not None:
            index = gather(rows).to(aux[0].device)
            states = torch.cat([h[index] for h in aux], dim=-1)  # [sum of counts, A*H]
        at = 0
        for req_id, (_, n) in zip(req_ids, rows, strict=True):
            self.drafter_kv.add(req_id, starts[req_id], n if states is None else states[at : at + n])
            at += n
        self.drafter_kv.trim()

    def repair(
        self, req_ids: list[str], starts: dict[str, int], read: Callable[[list[Span]], None], rows: int | None = None
    ) -> bool:
        """Read what went by while the head rested, and some of what older weights wrote; whether there was any.

        Args:
            req_ids: the batch. starts: the first position that the step computed, by request.
            read: writes the head's KV at positions of some rows, in one pass. rows: most of them in one.
        """
        late = list(self.drafter_kv.unread(req_ids, starts))
        again = list(self.drafter_kv.stale(req_ids, REBUILD_TOKENS))
        # A draft model reads one token more per row, and a request may have a row of each kind.
        room = max(1, int(self.drafter.max_num_tokens) - 2 * len(req_ids))
        batch: list[Span] = []
        used = 0
        for i, entry, start, stop in [*late, *again]:
            while start < stop:
                if used >= room or len(batch) == rows:
                    read(batch)
                    batch, used = [], 0
                n = min(stop - start, room - used)
                batch.append((i, entry, start, start + n))
                used, start = used + n, start + n
        if batch:
            read(batch)
        self.caught_up += sum(stop - start for _, _, start, stop in late)
        self.rebuilt += sum(stop - start for _, _, start, stop in again)
        for _, entry, _, stop in again:
            entry.fresh = stop
        return bool(batch)

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

    # ---- the engine --------------------------------------------------------------------------------------------------

    def sleeps(self, asleep: bool) -> None:
        """The engine's memory is released, or is there again."""
        self.asleep = asleep
        if self.training is not None:
            self.training.rests()

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
        out: dict[str, Any] = self.swapper.info() | {
            "off": self.off,
            "caught_up": self.caught_up,
            "reread": self.rebuilt,
        }
        if self.capture is not None:
            out["capture"] = self.capture.info()
        if self.training is not None:
            out["training"] = self.training.info()
        if self.specialists is not None:
            out["specialists"] = self.specialists.info()
        return out

    def drain(self) -> tuple[dict[str, float], dict[str, float]]:
        """Counts since the last call, and levels, by the names of `rollspec.telemetry.metrics`."""
        d = self.swapper.deployment
        pauses, d.pauses = d.pauses, []
        sums: dict[str, float] = {"caught_up": self.caught_up, "reread": self.rebuilt, **self.swapper.counts}
        levels: dict[str, float] = {"version": d.running.number}
        levels["staleness"] = self.engine.version - (d.running.since or 0)
        if pauses:
            levels["swap_longest"] = max(pauses)
        if self.engine.head is not None and (reached := self.engine.head.reached) is not None:
            levels["accept_length"] = reached
        if self.capture is not None:
            counts = self.capture.counts
            sums |= {"captured": counts["samples"], "capture_dropped": counts["dropped"]}
            sums["capture_seconds"] = self.capture.seconds
        if self.training is not None:
            t = self.training.info()
            sums |= {f"train_{k}": t[k] for k in ("steps", "tokens")}
            names = ("idle_seconds", "used_seconds", "wasted_seconds", "preempted")
            sums |= {k: t[k] for k in (*names, "sent", "sent_bytes", "feedback_dropped", "private") if k in t}
            if "away" in t:
                levels["away"] = float(t["away"] is not None)
            if t.get("loss") is not None:
                levels |= {"loss": t["loss"], "buffered": t["samples"], "train_length": t["length"]}
                levels |= {f"loss/{term}": value for term, value in t["terms"].items()}
            waits = ("preempt_seconds", "preempt_p99_seconds", "micro_step_seconds", "step_age_seconds", "idle_cost")
            levels |= {k: t[k] for k in waits if k in t}
        out = {k: v - self._drained.get(k, 0.0) for k, v in sums.items()}
        self._drained = sums
        if pauses:
            out |= {"swaps": len(pauses), "swap_seconds": sum(pauses)}
        return out, levels

    def before_step(self, ended: Any, computes: bool) -> None:
        """A step begins; `ended`: requests that did since the last one. Never raises.

        `computes` is False for the step after the last one, which only reports requests that ended.
        """
        if self.training is not None and computes:
            self.training.step_begins()
        for req_id in ended:
            self.drafter_kv.drop(req_id)
            if self.domains is not None:
                self.domains.forget(req_id)
            if self.capture is not None:
                self.capture.finish(req_id, self.engine.requests.get(req_id))
        try:
            if self.specialists is not None and self.specialists.stale:
                self.specialists.restore()
            self.swapper.poll()
        except Exception as e:  # the drafter may be half of one version and half of another: it must rest
            self.fail("swap", e)

    def fail(self, what: str, error: BaseException) -> None:
        """The draft head is off from now on; suffix drafting continues."""
        self.off = True
        self.engine.resting = True
        cause = f"{what}: {type(error).__name__}: {error}"
        self.bridge.count(cause)
        logger.error("rollspec: the draft head is off from now on (%s).", cause, exc_info=error)


def gather(rows: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Indices of [start, start + n) of every (start, n), one after the other. Shape [sum of n]."""
    starts, counts = np.array(rows, dtype=np.int64).T
    before = np.cumsum(counts) - counts
    return torch.from_numpy(np.repeat(starts - before, counts) + np.arange(int(counts.sum())))
