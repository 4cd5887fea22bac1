"""Suffix drafts and a learned drafter's in one batch: per request and step, the one that is worth more.

    passes = proposer.prepare(...)             # suffix chains are looked up; how many passes would pay?
    rows = <the engine runs that many>         # none where it is 0
    drafts = proposer.complete(rows, probs)    # per request, whichever is worth more

While the learned drafter rests, one pass every so many steps keeps its acceptance known (`PROBE_EVERY`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rollspec.config import RollspecConfig
from rollspec.proposal import budget
from rollspec.proposal.base import NO_DRAFT, Draft
from rollspec.proposal.proposer import FLOOR, Proposer, Request
from rollspec.proposal.router import Router, Vector, worth
from rollspec.tuning.tuner import Plan, View

PROBE_EVERY = 64
"""Steps after which a drafter that nobody asked for runs one pass, unverified."""

TRIAL_EVERY = 4
"""The same while its weights are on trial. The verdict takes as many passes either way; this is how soon it comes."""


class HybridProposer(Proposer):
    """A `Proposer` with one learned drafter beside the suffix trees (or alone, where these are off)."""

    def __init__(self, config: RollspecConfig, max_model_len: int, name: str) -> None:
        super().__init__(config, max_model_len)
        self.name = name
        self.router = Router(min(config.proposal.learned.k_max, self.k_max))
        self.passes = 0
        """Passes that `prepare` asks for; 0 for none."""
        self.scored: Callable[[str, int, int], None] | None = None
        """Told of every scored draft: request, tokens right, tokens that could be judged."""
        self.resting = False
        """True while the learned drafter cannot be run."""
        self._view = View([], [], [], [], np.zeros(len(self.tuner.arms)))
        self._price = 0.0
        self._since = PROBE_EVERY  # steps since the drafter last ran
        self.on_trial = False
        """True while its weights are to be judged."""
        self._pass_seconds: Vector = np.zeros(len(self.tuner.arms))
        self.drafter_version = 0
        """Version of the learned drafter's weights; 0: as started."""
        self._remembered: tuple[int, Mapping[str, Any]] | None = None  # (version, acceptance) of an earlier run

    def swapped(self, version: int, known: Mapping[str, Sequence[float]] | None = None) -> None:
        """The drafter's weights were replaced: what is known of it is old, and it may draft again.

        Args:
            version: of the weights that it has now.
            known: their acceptance, where they ran before.
        """
        acceptance = self.router.acceptance
        acceptance.changed()
        if known is None and self._remembered is not None and self._remembered[0] == version:
            known = self._remembered[1]
        if known is not None:
            acceptance.restore(known)
        self._remembered = None
        self.drafter_version = version
        for r in self.requests.values():
            r.learned.right = r.learned.hoped = 0.0
        self.tuner.guard.forget(self.name)
        self.tuner.changed()
        self._since = PROBE_EVERY

    @property
    def reached(self) -> float | None:
        """Tokens per verify step that the learned drafter's own drafts would give; None before any was scored."""
        acceptance = self.router.acceptance
        return 1.0 + float(acceptance.measured.cumprod().sum()) if acceptance.tries[0] else None

    def passed(self, passes: int, seconds: float, batch: int, late: float = 0.0) -> None:
        """The learned drafter ran `passes` passes for `batch` requests, `late` of the seconds to read what it missed.

        These are no part of what a pass costs: they are spent once after a rest. Were they, a drafter that is only
        probed would seem too dear to be run at all.
        """
        self.router.cost.observe(batch, passes, seconds - late)
        self.stats.passes += passes
        self.stats.pass_seconds += seconds

    def learned(self) -> dict[str, Any]:
        """See `Proposer.learned`; with the learned drafter's acceptance, and what its passes cost."""
        acceptance = {"version": self.drafter_version, "acceptance": self.router.acceptance.state()}
        return {**super().learned(), "drafter": acceptance, "passes": self.router.cost.state()}

    def relearn(self, learned: Mapping[str, Any]) -> None:
        """See `Proposer.relearn`. The acceptance is that of one version: it waits until that one is swapped in."""
        router = Router(self.router.k)
        if "passes" in learned:  # not there where it was learned on another machine
            router.cost.restore(learned["passes"])
        version, state = -1, None
        if "drafter" in learned:
            version, state = int(learned["drafter"]["version"]), learned["drafter"]["acceptance"]
            router.acceptance.restore(state)
        super().relearn(learned)
        self.router.cost = router.cost
        if state is not None and version == self.drafter_version:
            self.router.acceptance = router.acceptance
        elif state is not None:
            self._remembered = (version, state)

    # ---- the step ---------------------------------------------------------------------------------------------------

    def prepare(
        self, req_ids: Sequence[str], sampled: Sequence[Sequence[int]], scheduled: dict[str, Any], held: float = 0.0
    ) -> None:
        """See `Proposer.prepare`; `passes` then says how many passes the learned drafter should run."""
        self._view = View([], [], [], [], self._pass_seconds)
        super().prepare(req_ids, sampled, scheduled, held)
        start = time.perf_counter()
        self.passes = self._route(held)
        self._since = 0 if self.passes else self._since + 1
        self._count(start)

    def complete(
        self, rows: Sequence[Sequence[int]] | None = None, probs: Sequence[Sequence[float]] | None = None
    ) -> list[list[int]]:
        """The drafts to verify.

        Args:
            rows: what the learned drafter said, per request of the batch; None where it did not run.
            probs: the probability that it gave each of these tokens, given those before; None if not known.

        Returns:
            A draft per request, in the order that `prepare` was given, each of 0..k tokens.
        """
        start = time.perf_counter()
        if rows is not None:
            self._take(rows, probs)
        self._count(start)
        return super().complete()

    def _route(self, held: float) -> int:
        """Estimate the learned chains, prefer drafters by them, and say how many passes to run."""
        step, router = self._step, self.router
        self._pass_seconds = np.zeros(len(self.tuner.arms))
        for _, r, _ in step.rows:  # also of those that no draft was looked for: a draft is scored once
            x = r.learned
            x.draft, x.cells, x.expected, x.serves, x.sent, x.offered = NO_DRAFT, (), (), False, False, r.offered
        if not step.asked or self.resting:
            return 0
        batch = len(step.rows)
        fixed = self._budget.policy == "fixed"
        cost = self.tuner.cost
        price = self._price = 0.0 if fixed else max(FLOOR, budget.floor(batch, cost, held))
        chains = router.expected([r.learned.trust for _, r, _ in step.asked])  # [asked, k]
        rooms = [r.room(self.k) for _, r, _ in step.asked]
        chains[np.arange(router.k)[None] >= np.array(rooms)[:, None]] = 0.0
        plain = "suffix" in step.plan.drafters or not step.plan.drafters
        have = [worth(r.expected, price) if plain else 0.0 for _, r, _ in step.asked]
        gains = router.gains(chains, have, price) * (batch / len(step.asked))
        seconds = cost.seconds(batch, held)
        costs = router.costs(batch, seconds)
        rate = batch / seconds
        # One choice per draft length; a fixed budget asks for no price, so the passes are free to it as well.
        best = [router.passes(gains, costs, 0.0 if fixed else rate, d) for d in range(router.k + 1)]
        limits = [min(a.k, router.k) for a in self.tuner.arms]
        self._pass_seconds = np.where(self.tuner.learned, costs[[best[d] for d in limits]], 0.0)
        for (_, r, _), chain, value in zip(step.asked, chains, have, strict=True):
            x = r.learned
            x.expected = [p for p in chain.tolist() if p > price]
            x.serves = worth(x.expected, price) > value
            x.offered = len(x.expected) if x.serves else r.offered
        if self.name in step.plan.drafters:
            passes = best[min(step.plan.k, router.k)]
            if passes:
                return passes
        return 1 if self._since >= (TRIAL_EVERY if self.on_trial else PROBE_EVERY) else 0

    def _take(self, rows: Sequence[Sequence[int]], probs: Sequence[Sequence[float]] | None) -> None:
        """Take the learned drafter's chains, choose again now that they are known, and spend the budget on the best."""
        step = self._step
        floor = 0.0 if self._budget.policy == "fixed" else FLOOR
        plain = "suffix" in step.plan.drafters or not step.plan.drafters
        best: list[Sequence[float]] = []
        for i, r, _ in step.asked:
            x = r.learned
            room = r.room(self.k)
            tokens = list(rows[i][:room])
            if tokens:
                each = probs[i][: len(tokens)] if probs is not None else self.router.acceptance.rates[: len(tokens)]
                x.draft = Draft(tokens, np.cumprod(np.minimum(each, 1.0)).tolist(), self.name, 1)
                x.expected, x.cells = self.confidence.cumulative(x.draft, floor)
                x.serves = worth(x.expected, self._price) > (worth(r.expected, self._price) if plain else 0.0)
            else:
                x.draft, x.cells, x.expected, x.offered, x.serves = NO_DRAFT, (), [], 0, False
            best.append(x.expected if x.serves else r.expected)
        found = self._spend(best, step.asked, len(step.rows), step.plan, self._held)
        for (_, r, _), n in zip(step.asked, found, strict=True):
            r.learned.offered = n

    def _chosen(self, r: Request) -> tuple[Draft, int]:
        drafters, x = self._step.plan.drafters, r.learned
        both = self.name in drafters
        if both and x.serves and x.draft.token_ids:
            x.sent, x.version = True, self.drafter_version
            return x.draft, x.offered
        if "suffix" not in drafters:
            return NO_DRAFT, 0
        return r.draft, x.offered if both and not x.serves else r.offered

    def _learn(self, r: Request, new: Sequence[int], verified: int, accepted: int) -> int:
        x = r.learned
        known = super()._learn(r, new, 0 if x.sent else verified, accepted)
        if x.sent and verified:
            self._tally(self.name, x.expected, verified, min(accepted, verified))
        hits = 0
        if x.draft.token_ids:
            length = verified if x.sent else min(len(x.draft.token_ids), len(new))
            hits = self._score(r, new, length)
        if r.asked:
            self._see(r, known, hits)
        return known

    def _score(self, r: Request, new: Sequence[int], length: int) -> int:
        """Score the learned chain, of which `length` tokens could be judged; as `Confidence.observe`."""
        x = r.learned
        tokens = x.draft.token_ids
        hits = 0
        while hits < min(len(tokens), len(new)) and tokens[hits] == new[hits]:
            hits += 1
        judged = min(hits + 1, len(tokens), len(new))
        x.record(hits, judged, self.router.acceptance.rates)
        self.router.acceptance.observe(hits, judged)
        if self.scored is not None and length:
            self.scored(r.req_id, min(hits, length), length)
        if x.cells:
            return self.confidence.observe(self.name, list(x.cells), tokens, new)
        return hits if judged > hits or hits == len(tokens) else ~hits

    def _see(self, r: Request, known: int, hits: int) -> None:
        """Add the request's row to what the arms with the learned drafter would have done."""
        view, x = self._view, r.learned
        offered, expected = x.offered, r.expected
        if x.serves:  # where it was not run, what it was expected to do
            known, expected = hits if x.draft.token_ids else ~0, list(x.expected)
        if known < 0:
            known = ~known
            if known < offered:
                view.unknown.append((len(view.offered), expected))
        view.offered.append(offered)
        view.hits.append(known)
        view.learned.append(x.serves)

    def _observe(
        self,
        plan: Plan,
        decoding: int,
        offered: list[int],
        hits: list[int],
        unknown: list[tuple[int, list[float]]],
    ) -> None:
        self.tuner.observe(plan, decoding, self._held, offered, hits, unknown, self._view)
