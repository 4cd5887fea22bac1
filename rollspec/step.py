"""A decode step, on one page: from what the engine just sampled to the draft tokens that it verifies next.

    passes = engine.prepare(req_ids, sampled, scheduled, context_tokens)
    rows, probs = ...                      # the engine runs the draft head that many passes; none where it is 0
    drafts = engine.complete(rows, probs)  # per request, 0 to k tokens

`DraftEngine` knows no inference engine, takes no lock and formats nothing: an adapter calls it from one thread.
`begin` and `finish` announce requests, `timed` and `passed` times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollspec.drafting.base import NO_DRAFT, Draft
from rollspec.drafting.requests import Request, Step
from rollspec.drafting.state import DraftState
from rollspec.tuning.tuner import Rows, View


class DraftEngine(DraftState):
    """Drafts for all running requests of one inference engine."""

    _turn = 0  # which requests are drafted for while nothing is verified

    def step(
        self,
        req_ids: Sequence[str],
        sampled: Sequence[Sequence[int]],
        scheduled: Mapping[str, Sequence[int]],
        context_tokens: float = 0.0,
    ) -> list[list[int]]:
        """`prepare` and `complete` in one, for engines that run no draft head."""
        self.prepare(req_ids, sampled, scheduled, context_tokens)
        return self.complete()

    def prepare(
        self,
        req_ids: Sequence[str],
        sampled: Sequence[Sequence[int]],
        scheduled: Mapping[str, Sequence[int]],
        context_tokens: float = 0.0,
    ) -> int:
        """Learn from a finished step, plan the next one, and look drafts up for it.

        Args:
            req_ids: the batch, in the engine's order.
            sampled: tokens each request emitted in the step; empty where it is still in its prompt.
            scheduled: drafts that the step verified, by request id (the engine may have cut what was proposed).
            context_tokens: that the batch attends to.

        Returns:
            Passes that the draft head should run now.
        """
        with self.counters.drafting:
            running = self._observe(req_ids, sampled, scheduled)
            decoding, rows, view = self._learn(running)
            with self.counters.tuning:
                if self._plan is not None:
                    self.tuner.observe(self._plan, decoding, self._step.context_tokens, rows, view, self._measured)
                    self._measured = None
                plan = self._plan = self.tuner.plan(len(running), context_tokens)
            self._step = step = Step(len(req_ids), running, [], plan, context_tokens)
            cumulative = self._propose(step)
            with self.counters.tuning:
                for r, n in zip(step.asked, self.selection.allot(cumulative, step, self.tuner.cost), strict=True):
                    r.lookup.allowed = n
            return self._passes(step)

    def complete(
        self, head_rows: Sequence[Sequence[int]] | None = None, head_probs: Sequence[Sequence[float]] | None = None
    ) -> list[list[int]]:
        """Select what is verified, and hand it over.

        Args:
            head_rows: what the draft head proposed, per row of the batch; None where it did not run.
            head_probs: the probability that it gave each of these tokens, given those before; None if not known.

        Returns:
            A draft per request, in the order that `prepare` was given, each of 0..k tokens.
        """
        step = self._step
        with self.counters.drafting:
            if head_rows is not None and self.head is not None:
                preferred = self.head.read(step, head_rows, head_probs, self.confidence, self.selection, self.k)
                for r, n in zip(step.asked, self.selection.allot(preferred, step, self.tuner.cost), strict=True):
                    r.head.allowed = n
            drafts = self._hand_over(step)
        host = self.counters.drafted(step)
        self._drafted += host
        self.tuner.host(host, len(step.running), step.plan.k > 0)
        return drafts

    @property
    def rests_for(self) -> int:
        """How many steps after the next one will have no drafts, whatever is emitted until then."""
        return 0 if self._plan is None else self._plan.ahead

    def _observe(
        self, req_ids: Sequence[str], sampled: Sequence[Sequence[int]], scheduled: Mapping[str, Sequence[int]]
    ) -> list[Request]:
        """The requests that emitted something, with what was verified of their drafts."""
        running = []
        for place, tokens in enumerate(sampled):
            r = self.requests.get(req_ids[place]) if tokens else None
            if r is not None and not r.ended:  # an engine that runs ahead had one more step of it scheduled
                r.verify(place, tokens, len(scheduled.get(r.req_id) or ()))
                running.append(r)
        return running

    def _learn(self, running: Sequence[Request]) -> tuple[int, Rows, View | None]:
        """Score every proposal against what was emitted (calibration, the head's acceptance); corpora follow.

        Verified or not, so that the tuner learns of every arm: of those without the head from model-free proposals, of
        those with it from whichever was preferred. Returns how many requests had a chance of a draft, and both.
        """
        head, confidence, counters = self.head, self.confidence, self.counters
        decoding, rows = 0, Rows()
        view = View(runs=head.passes > 0, seconds=head.pass_seconds) if head is not None else None
        for r in running:
            p = r.lookup
            counters.stats.emitted += len(r.emitted)
            accepted = confidence.observe(p.draft.source, p.cells, p.draft.token_ids, r.emitted) if p.cells else 0
            if r.verified:
                p = r.head if r.head.sent else p
                counters.verified(p.draft.source, p.expected, r.verified, r.accepted)
                confidence.verified(p.draft.source, sum(p.expected[: r.verified]), min(r.accepted, r.verified))
            head_accepted = head.score(r, confidence, self.scored) if head is not None else 0
            decoding += len(r.output) > r.began_at
            if r.asked:
                rows.add(r.lookup.allowed, accepted, r.lookup.expected)
                if view is not None:
                    h = r.head
                    if not h.serves:
                        view.add(h.allowed, accepted, r.lookup.expected)
                    else:  # where it was not run, what it was expected to do
                        view.add(h.allowed, head_accepted if h.draft.token_ids else ~0, h.expected)
                    view.served.append(h.serves)
            self.selection.learn(r, accepted, head_accepted, len(running))
            if self.think is not None:
                counters.thought(r, self.think)
            r.append()
            for d in self.drafters:
                d.observe(r)
        return decoding, rows, view

    def _propose(self, step: Step) -> list[Sequence[float]]:
        """Look drafts up for the requests that the plan names; per request asked, the calibrated acceptance."""
        plan, most = step.plan, min(self.k, self.tuner.k_most)
        floor = self.selection.floor(len(step.running), self.tuner.cost, step.context_tokens)
        rooms = []
        self._turn += 1
        for at, r in enumerate(step.running):
            r.lookup.clear()
            r.asked = False
            if not most or plan.rest or (plan.watch and (at + self._turn) % plan.watch) or r.ended:
                continue
            if (room := r.room(most)) > 0:
                r.asked = True
                step.asked.append(r)
                rooms.append(room)
        cumulative = []
        for r, draft in zip(step.asked, self._looked_up(step.asked, rooms), strict=True):
            p = r.lookup
            p.draft = draft
            if draft.token_ids:
                p.expected, p.cells = self.confidence.cumulative(draft, floor)
            cumulative.append(self.selection.cut(r, p, len(step.running)))
        return cumulative

    def _looked_up(self, asked: Sequence[Request], rooms: Sequence[int]) -> list[Draft]:
        """Each one's first proposal, in the drafters' order."""
        drafts = [NO_DRAFT] * len(asked)
        for d in self.drafters:
            if not (rest := [i for i, draft in enumerate(drafts) if not draft.token_ids]):
                break
            for i, found in zip(rest, d.propose_all([asked[i] for i in rest], [rooms[i] for i in rest]), strict=True):
                drafts[i] = found or NO_DRAFT
        return drafts

    def _passes(self, step: Step) -> int:
        """How many passes of the head gain more than they cost."""
        if (head := self.head) is None:
            return 0
        passes = head.route(step, self.tuner, self.selection, self.k, resting=self.resting, canary=self.canary_runs)
        head.rested = head.since > 0
        head.since = 0 if passes else head.since + 1
        return passes

    def _hand_over(self, step: Step) -> list[list[int]]:
        """Per request the proposal worth more, as far as budget and plan allow; then corpora store what was emitted."""
        drafts: list[list[int]] = [[] for _ in range(step.size)]
        if k := min(self.k, step.plan.k):
            for r in step.asked:
                draft, allowed = self._chosen(r, step)
                if allowed:
                    drafts[r.place] = draft.token_ids[: min(allowed, k)]
        for d in self.drafters:
            d.store_all(step.running, step.plan.rest or not self.tuner.k_most)
        self.selection.refill.step()
        return drafts

    def _chosen(self, r: Request, step: Step) -> tuple[Draft, int]:
        """The proposal that is handed over for the request, and how many tokens of it the budget allows."""
        h, head = r.head, self.head
        routed = head is not None and head.name in step.plan.drafters
        if head is not None and routed and h.serves and h.draft.token_ids:
            h.sent, h.version = True, head.version
            return h.draft, h.allowed
        if not step.uses_memory:
            return NO_DRAFT, 0
        return r.lookup.draft, h.allowed if routed and not h.serves else r.lookup.allowed
