"""The drafting side of an engine, without the engine: requests in, variable-length drafts out, everything counted.

An engine adapter calls `begin` when a request first samples, `step` after each step with what was sampled, and `finish`
when a request ends. Timing is the adapter's: it passes how long the step took and how many tokens it computed.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollspec.config import RollspecConfig
from rollspec.proposal import budget
from rollspec.proposal.base import NO_DRAFT, Draft, TokenArray, as_tokens, prompt_key
from rollspec.proposal.confidence import Confidence
from rollspec.proposal.history import History, Response
from rollspec.proposal.suffix import Group, SuffixDrafter
from rollspec.telemetry.metrics import EngineStats
from rollspec.tuning.cost import CostModel

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
    draft: Draft = field(default_factory=lambda: NO_DRAFT)  # proposed after the last step, whole
    cells: list[int] = field(default_factory=list)  # its calibration cells
    expected: list[float] = field(default_factory=list)  # its calibrated cumulative probabilities
    sent: int = 0  # how much of it was handed to the engine


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
        self.cost = CostModel()
        self.requests: dict[str, Request] = {}
        self.stats = EngineStats()
        self._depth = config.proposal.suffix.max_depth
        self._goodput = config.proposal.budget.policy == "goodput"
        self._peak = 0  # largest batch of this rollout round, for the tail

    # ---- requests ---------------------------------------------------------------------------------------------------

    def begin(
        self, req_id: str, prompt: Sequence[int] | TokenArray, max_tokens: int, stop_ids: Collection[int] = ()
    ) -> None:
        """A request samples its first token next."""
        start = time.perf_counter()
        tokens = as_tokens(prompt)
        key = prompt_key(tokens)
        group, sequence = self.suffix.open(key, tokens, self.version)
        max_tokens = min(max_tokens, self.max_model_len - len(tokens))
        self.requests[req_id] = Request(
            key, tokens, group, sequence, self.version, max_tokens, stop_ids, tokens[-self._depth :].tolist()
        )
        self.stats.propose_seconds += time.perf_counter() - start

    def finish(self, req_id: str) -> None:
        """A request ended or was aborted; what it said is history from now on. Unknown ids are ignored."""
        r = self.requests.pop(req_id, None)
        if r is None:
            return
        start = time.perf_counter()
        tokens = as_tokens(r.output)
        self.suffix.close(r.group, r.sequence, tokens, r.version)
        if len(tokens):
            self.history.add(r.key, r.prompt, Response(tokens, r.version))
        self.stats.propose_seconds += time.perf_counter() - start

    def set_version(self, version: int) -> None:
        """The policy changed: a new round begins for every prompt that comes from now on."""
        self.version = version
        self._peak = 0

    # ---- the step ---------------------------------------------------------------------------------------------------

    def step(
        self, req_ids: Sequence[str], sampled: Sequence[Sequence[int]], scheduled: dict[str, Any]
    ) -> list[list[int]]:
        """Learn from a finished step and draft for the next one.

        Args:
            req_ids: the batch, in the engine's order.
            sampled: tokens each request emitted in the step; empty where it is still in its prompt.
            scheduled: drafts that the step verified, by request id (the engine may have cut what was proposed).

        Returns:
            A draft per request, same order, each of 0..k tokens.
        """
        start = time.perf_counter()
        stats = self.stats
        drafts: list[list[int]] = [[] for _ in req_ids]
        rows: list[tuple[int, Request]] = []
        said: list[Sequence[int]] = []  # `sampled` without what the scheduler will cut, in the order of `rows`
        floor = FLOOR
        if self._goodput:
            floor = max(floor, budget.floor(sum(map(bool, sampled)), self.cost))
        for i, new in enumerate(sampled):
            if not new:
                continue
            r = self.requests.get(req_ids[i])
            if r is None:
                continue
            verified = scheduled.get(req_ids[i])
            accepted = len(new) - 1
            if accepted:
                new = _trim(new, r.max_tokens - len(r.output), r.stop_ids)
            self._learn(r, new, len(verified) if verified else 0, min(accepted, len(new)))
            rows.append((i, r))
            said.append(new)
            context = r.context
            context.extend(new)
            if len(context) > self._depth:
                del context[: -self._depth]
            r.output.extend(new)
            # The last token of a request is sampled by the target itself, so one draft less than what is left.
            room = min(self.k, r.max_tokens - len(r.output) - 1)
            if room > 0 and r.output[-1] not in r.stop_ids:
                draft = self.suffix.draft(r.group, context, room)
                r.draft = draft
                r.expected, r.cells = self.confidence.cumulative(draft, floor) if draft.token_ids else ([], [])
            else:
                r.draft, r.expected, r.cells = NO_DRAFT, [], []
        if self._goodput:
            lengths = budget.allocate([r.expected for _, r in rows], len(rows), self.cost)
        else:
            lengths = [len(r.draft.token_ids) for _, r in rows]
        for (i, r), n, new in zip(rows, lengths, said, strict=True):
            r.sent = n
            if n:
                drafts[i] = r.draft.token_ids[:n]
            self.suffix.extend(r.group, r.sequence, list(new))
        stats.requests += len(rows)
        self._peak = max(self._peak, len(rows))
        stats.peak_batch = max(stats.peak_batch, len(rows))
        stats.propose_seconds += time.perf_counter() - start
        return drafts

    def timed(self, tokens: int, decode_only: bool, seconds: float, batch: int) -> None:
        """The step that `step` was told of computed `tokens` tokens in `seconds`."""
        self.stats.steps += 1
        self.stats.step_seconds += seconds
        if 4 * batch <= self._peak:
            self.stats.tail_seconds += seconds
        if decode_only:
            self.cost.observe(tokens, seconds)

    def _learn(self, r: Request, new: Sequence[int], verified: int, accepted: int) -> None:
        stats = self.stats
        stats.emitted += len(new)
        draft = r.draft
        if r.cells:
            self.confidence.observe(draft.source, r.cells, draft.token_ids, new)
        if not verified:
            return
        accepted = min(accepted, verified)
        stats.verified += 1
        stats.drafted += verified
        stats.accepted += accepted
        stats.predicted += sum(r.expected[:verified])
        row = stats.by_source.setdefault(draft.source, [0, 0, 0])
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
        out.history_bytes = self.history.bytes
        out.tree_bytes = self.suffix.tree_bytes
        out.prompts = len(self.history)
        out.evicted, self.history.evicted = self.history.evicted, 0
        out.rewarded, self.history.rewarded = self.history.rewarded, 0
        return out

    def snapshot(self) -> dict[str, Any]:
        """History including what running requests have said so far, to be written by `History.save`."""
        running = (
            (r.key, r.prompt, Response(as_tokens(r.output), r.version)) for r in self.requests.values() if r.output
        )
        return self.history.snapshot(running)


def _trim(new: Sequence[int], room: int, stop_ids: Collection[int]) -> Sequence[int]:
    """What the engine's scheduler keeps of a step's tokens: up to the first stop token and the length limit.

    In a verify step the sampler may emit tokens past either; the scheduler cuts them after the worker saw them.
    """
    for i, token in enumerate(new):
        if token in stop_ids:
            return new[: min(i + 1, room)]
    return new[:room]
