"""The drafting side of an engine, without the engine: requests in, variable-length drafts out, everything counted.

An engine adapter calls `begin` when a request first samples, `step` after each step with what was sampled, and `finish`
when a request ends. Timing is the adapter's: it passes how long the step took and how many tokens it computed.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollspec.config import RollspecConfig
from rollspec.proposal import budget, lengths
from rollspec.proposal.base import NO_DRAFT, Draft, TokenArray, as_tokens, prompt_key
from rollspec.proposal.confidence import Confidence
from rollspec.proposal.history import History, Response
from rollspec.proposal.replay import Replay
from rollspec.proposal.router import Learned
from rollspec.proposal.suffix import Group, SuffixDrafter
from rollspec.telemetry.metrics import EngineStats
from rollspec.tuning.tuner import Plan, Tuner

LENGTHS_EVERY = 16
"""Tokens after which a request's expected length is looked at again."""

FLOOR = 0.03
"""Chains end below this chance of acceptance at the latest: no step is so cheap per token that it would pay."""


@dataclass(slots=True)
class Request:
    """One running request. `context`: last tokens of prompt + response, as the trees match them."""

    key: str
    prompt: TokenArray
    group: Group
    sequence: int
    version: int
    max_tokens: int
    stop_ids: Collection[int]
    context: list[int]
    output: list[int] = field(default_factory=list)
    said: int = 0  # tokens of it that were there from the start
    draft: Draft = field(default_factory=lambda: NO_DRAFT)  # proposed after the last step, whole
    cells: list[int] = field(default_factory=list)  # its calibration cells
    expected: list[float] = field(default_factory=list)  # its calibrated cumulative probabilities
    asked: bool = False  # whether a draft was looked for
    offered: int = 0  # how much of it the budget allowed, whatever the arm
    remaining: float = 0.0  # expected tokens until its end
    remaining_at: int = 0  # output length from which on that is too old
    stream: int | None = None  # key of its noise, where that is kept over epochs
    replay: Replay | None = None  # what it said with it an epoch ago
    fresh: list[int] = field(default_factory=list)  # said, and not in the tree yet
    counted: tuple[int, ...] = (0, 0, 0, 0)  # what of `reused` was counted when an earlier part of it was aborted
    req_id: str = ""
    origin: str | None = None  # names the rollout, where it may be made of several requests
    private: bool = False  # nothing of it stays when it ends
    ended: bool = False  # by its stop token or its limit
    least: int = 0  # tokens of it before which no stop token may come
    learned: Learned = field(default_factory=Learned)

    def room(self, most: int) -> int:
        """Tokens that may be drafted, of `most`; not above 0 where there are none."""
        # The last token of a request is sampled by the target itself, so one draft less than what is left.
        room = min(most, self.max_tokens - len(self.output) - 1)
        if (early := self.least - len(self.output)) > 0:
            # vLLM decides by the first row of a step whether the one after all drafts may stop
            # (vllm/v1/sample/logits_processor/builtin.py, `MinTokensLogitsProcessor`).
            room = min(room, early - 1)
        return room

    def reused(self, length: int) -> tuple[int, ...]:
        """For `EngineStats.reuse`, of a response of `length` tokens that had an old one to repeat."""
        assert self.replay is not None
        return 1, length, self.replay.at, int(self.replay.identical(length))


@dataclass(slots=True)
class _Step:
    """What `prepare` leaves to `complete`. Rows: place in the batch, request, what it just said."""

    size: int
    rows: list[tuple[int, Request, Sequence[int]]]
    asked: list[tuple[int, Request, Sequence[int]]]
    plan: Plan


class Proposer:
    """Drafts for all running requests of one engine. One thread."""

    def __init__(self, config: RollspecConfig, max_model_len: int) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self.k_max = self.k = config.proposal.k_max
        self.version = 0
        self.history = History(config.history.max_bytes, config.proposal.suffix.window)
        self.suffix = SuffixDrafter(config.proposal.suffix, self.history, config.history.tree_max_bytes)
        self.confidence = Confidence()
        self.tuner = Tuner(config.tuning, self.k_max, config.proposal.drafters)
        self.requests: dict[str, Request] = {}
        self.stats = EngineStats()
        self._depth = self.suffix.context
        self._budget = config.proposal.budget
        self._plan: Plan | None = None  # what was decided after the last step
        self._step = _Step(0, [], [], Plan(0, 0, 0, 0, 0, 0))
        self._refill = lengths.Refill()
        self._turn = 0  # which requests are drafted for while nothing is verified
        self._host = 0.0  # drafting seconds since the last step, `begin` and `finish` included
        self._held = 0.0  # context tokens of the batch when the plan was made
        self._peak = 0  # largest batch of this rollout round, for the tail

    # ---- requests ---------------------------------------------------------------------------------------------------

    def begin(
        self,
        req_id: str,
        prompt: Sequence[int] | TokenArray,
        max_tokens: int,
        stop_ids: Collection[int] = (),
        stream: int | None = None,
        said: Sequence[int] = (),
        private: bool = False,
        origin: str | None = None,
        min_tokens: int = 0,
    ) -> None:
        """A request samples its first token next, or the one after the tokens `said` that it starts from.

        `stream`: key of its noise, where that is kept over epochs. `private`: other requests are not drafted for from
        what it says, and nothing of it is kept. `origin`: the same for all requests that one rollout is made of, which
        begins again after an abort with what it has said. `min_tokens`: that it says before it may stop, `said` apart.
        """
        start = time.perf_counter()
        self._refill.began()
        tokens = as_tokens(prompt)
        key = f"private-{req_id}" if private else prompt_key(tokens)
        group, sequence = self.suffix.open(key, tokens, self.version)
        max_tokens = min(max_tokens, self.max_model_len - len(tokens))
        context = [*tokens[-self._depth :].tolist(), *said][-self._depth :]
        r = self.requests[req_id] = Request(
            key, tokens, group, sequence, self.version, max_tokens, stop_ids, context, list(said), len(said)
        )
        r.req_id, r.private, r.origin = req_id, private, origin
        r.least = len(said) + min_tokens if min_tokens else 0
        if said:
            self.suffix.extend(group, sequence, list(said))
        if stream is not None and not private:
            r.stream = stream
            old = self.history.previous(key, stream, self.version, origin)
            if old is not None:
                part = self.history.part(key, origin) if origin is not None else None
                if part is not None:  # of at least as many tokens as came back to be gone on with
                    r.replay = Replay(old.tolist())
                    r.replay.said(part.tolist())
                    r.counted = r.reused(len(part))
                r.replay = Replay(old.tolist())
                r.replay.said(said)
        self._count(start)

    def finish(self, req_id: str) -> None:
        """A request ended or was aborted; what it said is history from now on. Unknown ids are ignored."""
        r = self.requests.pop(req_id, None)
        if r is None:
            return
        start = time.perf_counter()
        self._refill.ended()
        if r.private:
            self.suffix.forget(r.group)
            self._count(start)
            return
        tokens = as_tokens(r.output)
        if r.fresh:
            self.suffix.extend(r.group, r.sequence, r.fresh)
        self.suffix.close(r.group, r.sequence, tokens, r.version)
        if len(tokens):
            self.history.add(r.key, r.prompt, Response(tokens, r.version, stream=r.stream, origin=r.origin))
        if r.replay is not None:
            counts = zip(self.stats.reuse, r.reused(len(tokens)), r.counted, strict=True)
            self.stats.reuse = [a + b - before for a, b, before in counts]
        self._count(start)

    def _count(self, start: float) -> None:
        seconds = time.perf_counter() - start
        self.stats.propose_seconds += seconds
        self._host += seconds

    def set_version(self, version: int) -> None:
        """The policy changed: a new round begins for every prompt that comes from now on."""
        self.version = version
        self._peak = 0
        self.tuner.changed()

    # ---- the step ---------------------------------------------------------------------------------------------------

    def step(
        self, req_ids: Sequence[str], sampled: Sequence[Sequence[int]], scheduled: dict[str, Any], held: float = 0.0
    ) -> list[list[int]]:
        """Learn from a finished step and draft for the next one: `prepare` and `complete` in one.

        Returns:
            A draft per request, same order, each of 0..k tokens.
        """
        self.prepare(req_ids, sampled, scheduled, held)
        return self.complete()

    def prepare(
        self, req_ids: Sequence[str], sampled: Sequence[Sequence[int]], scheduled: dict[str, Any], held: float = 0.0
    ) -> None:
        """Learn from a finished step and look drafts up for the next one.

        Args:
            req_ids: the batch, in the engine's order.
            sampled: tokens each request emitted in the step; empty where it is still in its prompt.
            scheduled: drafts that the step verified, by request id (the engine may have cut what was proposed).
            held: context tokens that the batch holds.
        """
        start = time.perf_counter()
        stats = self.stats
        rows: list[tuple[int, Request, Sequence[int]]] = []
        offered: list[int] = []
        hits: list[int] = []
        unknown: list[tuple[int, list[float]]] = []
        decoding = 0
        for i, new in enumerate(sampled):
            if not new:
                continue
            r = self.requests.get(req_ids[i])
            if r is None or r.ended:  # an engine that runs ahead had one more step of it scheduled
                continue
            verified = scheduled.get(req_ids[i])
            accepted = len(new) - 1
            if accepted:
                new = _trim(new, r.max_tokens - len(r.output), r.stop_ids)
            known = self._learn(r, new, len(verified) if verified else 0, min(accepted, len(new)))
            decoding += len(r.output) > r.said
            if r.asked:
                if known < 0:
                    known = ~known
                    if known < r.offered:
                        unknown.append((len(offered), r.expected))
                offered.append(r.offered)
                hits.append(known)
            r.context.extend(new)
            if len(r.context) > self._depth:
                del r.context[: -self._depth]
            r.output.extend(new)
            r.ended = len(r.output) >= r.max_tokens or r.output[-1] in r.stop_ids
            if r.replay is not None:
                r.replay.said(new)
            rows.append((i, r, new))
        learned = time.perf_counter()
        if self._plan is not None:
            self._observe(self._plan, decoding, offered, hits, unknown)
        plan = self._plan = self.tuner.plan(len(rows), held)
        self._held = held
        planned = time.perf_counter()
        chains, asked = self._draft(rows, plan, held)
        drafted = time.perf_counter()
        for (_, r, _), n in zip(asked, self._spend(chains, asked, len(rows), plan, held), strict=True):
            r.offered = n
        self._step = _Step(len(req_ids), rows, asked, plan)
        end = time.perf_counter()
        stats.tuner_seconds += planned - learned + end - drafted
        self._count(start)

    def complete(self) -> list[list[int]]:
        """The drafts that `prepare` looked up, as far as they are to be verified.

        Returns:
            A draft per request, in the order that `prepare` was given, each of 0..k tokens.
        """
        start = time.perf_counter()
        step, stats = self._step, self.stats
        drafts: list[list[int]] = [[] for _ in range(step.size)]
        k = min(self.k, step.plan.k)
        if k:
            for i, r, _ in step.asked:
                draft, offered = self._chosen(r)
                if offered:
                    drafts[i] = draft.token_ids[: min(offered, k)]
        for _, r, new in step.rows:
            if step.plan.rest:  # nobody looks; a few tokens at once cost less than one at a time
                r.fresh.extend(new)
            else:
                self.suffix.extend(r.group, r.sequence, [*r.fresh, *new])
                r.fresh.clear()
        self._refill.step()
        batch = len(step.rows)
        stats.requests += batch
        self._peak = max(self._peak, batch)
        stats.peak_batch = max(stats.peak_batch, batch)
        self._count(start)
        self.tuner.host(self._host, batch, step.plan.k > 0)
        self._host = 0.0
        return drafts

    def _observe(
        self,
        plan: Plan,
        decoding: int,
        offered: list[int],
        hits: list[int],
        unknown: list[tuple[int, list[float]]],
    ) -> None:
        self.tuner.observe(plan, decoding, self._held, offered, hits, unknown)

    def _chosen(self, r: Request) -> tuple[Draft, int]:
        """What is proposed for the request, and how much of it the budget allows."""
        return r.draft, r.offered

    def _draft(
        self, rows: Sequence[tuple[int, Request, Sequence[int]]], plan: Plan, held: float
    ) -> tuple[list[list[float]], list[tuple[int, Request, Sequence[int]]]]:
        """Look drafts up for the requests that the plan names; their calibrated chains, and those requests."""
        floor = FLOOR
        b = self._budget
        if b.policy == "fixed":
            floor = 0.0
        else:
            floor = max(floor, budget.floor(len(rows), self.tuner.cost, held))
            if self._power():
                floor /= lengths.LIMITS[1]  # what counts double pays at half the chance
        most = min(self.k, self.tuner.k_most)
        chains: list[list[float]] = []
        asked: list[tuple[int, Request, Sequence[int]]] = []
        self._turn += 1
        for place, row in enumerate(rows):
            r = row[1]
            r.draft, r.expected, r.cells, r.offered, r.asked = NO_DRAFT, [], [], 0, False
            if not most or plan.rest or (plan.watch and (place + self._turn) % plan.watch):
                continue
            room = r.room(most)
            if room <= 0 or r.output[-1] in r.stop_ids:
                continue
            r.asked = True
            draft = (r.replay and r.replay.draft(room)) or self.suffix.draft(r.group, r.context, room)
            if draft.token_ids:
                r.draft = draft
                r.expected, r.cells = self.confidence.cumulative(draft, floor)
            chain = r.expected
            if b.cut != "none":
                n = budget.svip_cut(draft.probs) if b.cut == "svip" else budget.specdec_cut(chain)
                chain = chain[:n]
            chains.append(chain)
            asked.append(row)
        return chains, asked

    def _spend(
        self,
        chains: Sequence[Sequence[float]],
        asked: Sequence[tuple[int, Request, Sequence[int]]],
        batch: int,
        plan: Plan,
        held: float,
    ) -> list[int]:
        """How much of each proposal is worth verifying, before the arm's own limit."""
        b = self._budget
        if b.policy == "fixed" or not any(chains):
            return [len(chain) for chain in chains]
        weights = None
        if (power := self._power()) and len(asked) > 1:
            weights = lengths.weights([self._remaining(r) for _, r, _ in asked], power)
        copies = batch / len(asked) if plan.watch else 1.0
        return budget.allocate(chains, batch, self.tuner.cost, held, weights, copies)

    def _power(self) -> float:
        """How much more the long requests count now."""
        power = self._budget.length_weight * (1.0 - self._refill.rate)
        return power if power > 0.05 else 0.0

    def _remaining(self, r: Request) -> float:
        said = len(r.output)
        if said >= r.remaining_at:
            r.remaining = lengths.remaining(said, r.group.ended, r.max_tokens)
            r.remaining_at = said + LENGTHS_EVERY
        return r.remaining

    def timed(self, tokens: int, decode_only: bool, seconds: float, batch: int) -> None:
        """The step that `step` is about to be told of computed `tokens` tokens in `seconds`."""
        self.stats.steps += 1
        self.stats.step_seconds += seconds
        if 4 * batch <= self._peak:
            self.stats.tail_seconds += seconds
        if decode_only:
            self.tuner.cost.observe(tokens, seconds, self._held, 0, batch)

    def _learn(self, r: Request, new: Sequence[int], verified: int, accepted: int) -> int:
        """Count a request's step. Returns what `Confidence.observe` says of its proposal; 0 if there was none."""
        self.stats.emitted += len(new)
        draft = r.draft
        hits = self.confidence.observe(draft.source, r.cells, draft.token_ids, new) if r.cells else 0
        if verified:
            self._tally(draft.source, r.expected, verified, min(accepted, verified))
        return hits

    def _tally(self, source: str, expected: Sequence[float], verified: int, accepted: int) -> None:
        stats = self.stats
        stats.verified += 1
        stats.drafted += verified
        stats.accepted += accepted
        stats.predicted += sum(expected[:verified])
        row = stats.by_source.setdefault(source, [0, 0, 0])
        row[0] += 1
        row[1] += verified
        row[2] += accepted
        positions = stats.by_position
        while len(positions) < verified:
            positions.append([0, 0])
        for i in range(min(accepted + 1, verified)):
            positions[i][0] += 1
            positions[i][1] += i < accepted

    # ---- what the trainer and telemetry ask for ---------------------------------------------------------------------

    def drain(self) -> EngineStats:
        """Counters since the last call, with the present levels filled in."""
        out, self.stats = self.stats, EngineStats()
        out.version = self.version
        out.correlated = self.config.reuse.seeds == "keep"
        out.history_bytes = self.history.bytes
        out.tree_bytes = self.suffix.tree_bytes
        out.prompts = len(self.history)
        out.evicted, self.history.evicted = self.history.evicted, 0
        out.rewarded, self.history.rewarded = self.history.rewarded, 0
        tuner = self.tuner
        out.modelled = tuner.ledger.close()
        out.plays = {a.name: int(n) for a, n in zip(tuner.arms, tuner.plays, strict=True) if n}
        tuner.plays[:] = 0
        out.cost_error = tuner.cost.error
        out.cost_skipped, tuner.cost.skipped = tuner.cost.skipped, 0
        out.alarms, tuner.guard.alarms = tuner.guard.alarms, 0
        out.recoveries, tuner.guard.recoveries = tuner.guard.recoveries, 0
        out.drafters_off = tuner.guard.off
        return out

    def snapshot(self) -> dict[str, Any]:
        """History including what running requests have said so far, to be written by `History.save`."""
        running = (
            (r.key, r.prompt, Response(as_tokens(r.output), r.version, stream=r.stream))
            for r in self.requests.values()
            if r.output and not r.private
        )
        return self.history.snapshot(running)

    def learned(self) -> dict[str, Any]:
        """What was learned about speed and acceptance, in JSON types; `rollspec.tuning.store` keeps it."""
        return {"tuner": self.tuner.state(), "confidence": self.confidence.state()}

    def relearn(self, learned: Mapping[str, Any]) -> None:
        """Start from what an earlier run learned.

        Raises:
            ValueError, KeyError, TypeError: it cannot be used; nothing of it is.
        """
        confidence, tuner = Confidence(), Tuner(self.config.tuning, self.k_max, self.config.proposal.drafters)
        confidence.restore(learned["confidence"])
        if "tuner" in learned:
            tuner.restore(learned["tuner"])
        self.confidence, self.tuner, self._plan = confidence, tuner, None


def _trim(new: Sequence[int], room: int, stop_ids: Collection[int]) -> Sequence[int]:
    """What the engine's scheduler keeps of a step's tokens: up to the first stop token and the length limit.

    In a verify step the sampler may emit tokens past either; the scheduler cuts them after the worker saw them.
    """
    for i, token in enumerate(new):
        if token in stop_ids:
            return new[: min(i + 1, room)]
    return new[:room]
