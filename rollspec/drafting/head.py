"""The draft head as a drafter: an EAGLE-3 head or a draft model, which the engine runs where it pays.

Before a pass is run its proposals are estimated and weighed against suffix drafts (`proposal/router.py`), after it
once more with what it proposed. While the head rests it is probed, as often as that is cheap: its acceptance stays
known at every position that it may reach, and what its passes cost at the most. After a rest it has to read what it
missed, which in a full batch takes longer than a step, so that is part of what it costs to begin again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rollspec.config import RollspecConfig
from rollspec.drafting.base import Draft, Drafter, register_drafter
from rollspec.drafting.requests import Request, Step
from rollspec.drafting.selection import FLOOR, Selection
from rollspec.proposal.confidence import Confidence
from rollspec.proposal.history import History
from rollspec.proposal.router import HeadAcceptance, PassCost, best_passes, gains, worth
from rollspec.tuning.strategy import Vector
from rollspec.tuning.tuner import Tuner

PROBE_EVERY = 64  # steps after which a head that rests is run once, as far as it may reach, until its costs are known
PROBE_SHARE, PROBE_LEAST, PROBE_MOST = 0.01, 32, 1024  # then: part of the time that goes to it, within so many steps
EARLY_EVERY, KNOWN = 8, 32  # the same until its first position was tried so often
BEGIN_OVER = 128  # steps over which a head that begins again has to pay for reading what it missed
REACH = 0.1  # cumulative acceptance below which a position is not probed

CANARY_EVERY = 4  # steps after which one pass is run while its weights are a canary: how soon its verdict comes


Scored = Callable[[str, int, int], None]  # of a scored draft: request, tokens that the target emitted, that are known


@register_drafter("eagle3", "draft_model", "mtp")
class Head(Drafter):
    """One draft head beside suffix drafts, or alone. e is an embedding, h the target's hidden states, W a projection:

    EAGLE-3 (arXiv:2503.01840)           token p + 2 from layer([e(p + 1); W [h_low(p); h_mid(p); h_high(p)]])
    MTP (DeepSeek-V3, arXiv:2412.19437)  token p + 2 from layer(W [norm(h(p)); norm(e(p + 1))])
    draft model (arXiv:2211.17192)       token p + 2 from a small model of its own, over tokens alone

    From the second pass on a head's own output stands in for h.
    """

    def __init__(self, name: str, config: RollspecConfig, history: History) -> None:
        self.name = name
        self.k = min(config.proposal.head.k_max, config.proposal.k_max)  # most passes per step
        self.acceptance, self.cost = HeadAcceptance(self.k), PassCost()
        self.version = 0  # of its weights; 0: as started
        self.passes = np.zeros(0, int)  # [arms] that it would run
        self.pass_seconds: Vector = np.zeros(0)  # [arms] that they would take
        self.since = PROBE_EVERY  # steps since it last ran
        self.rested = True  # not run in the step before its present pass: then its weights are in no cache
        self._price = 0.0
        self._remembered: tuple[int, Mapping[str, Any]] | None = None  # (version, acceptance) of an earlier run

    def route(self, step: Step, tuner: Tuner, selection: Selection, most: int, *, resting: bool, canary: bool) -> int:
        """Estimate its proposals, prefer it or suffix drafts per request, and say how many passes to run.

        `most`: longest draft of a request. `resting`: it cannot be run now. `canary`: its weights are to be judged.
        """
        asked, k = step.asked, self.k
        self.passes, self.pass_seconds = np.zeros(len(tuner.arms), int), np.zeros(len(tuner.arms))
        for r in step.running:  # also of those that no draft was looked for: a draft is scored once
            r.head.clear()
            r.head.serves = r.head.sent = False
            r.head.allowed = r.lookup.allowed
        if not asked or resting:
            return 0
        batch, context = len(step.running), step.context_tokens
        price = self._price = selection.price(batch, tuner.cost, context)
        expected = self.acceptance.expected([r.head.trust for r in asked])  # [asked, k]
        rooms = np.array([r.room(most) for r in asked])
        expected[np.arange(k)[None] >= rooms[:, None]] = 0.0
        have = [worth(r.lookup.expected, price) if step.uses_memory else 0.0 for r in asked]
        gained = gains(expected, have, price) * (batch / len(asked))
        seconds = tuner.cost.seconds(batch, context)
        costs = np.array([self.cost.seconds(batch, d, seconds) for d in range(k + 1)])
        after = self.cost.after_rest(batch)
        if self.since and after is not None:
            costs[1:] += after[1] / BEGIN_OVER
        # One choice per draft length; a fixed budget asks for no price, so the passes are free to it as well.
        rate = 0.0 if selection.fixed else tuner.pace(batch, context)
        best = [best_passes(gained, costs, rate, d) for d in range(k + 1)]
        self.passes = np.where(tuner.with_model, np.array(best)[np.minimum(tuner.ks, k)], 0)
        self.pass_seconds = costs[self.passes]
        for r, probs, value in zip(asked, expected, have, strict=True):
            h = r.head
            h.expected = [p for p in probs.tolist() if p > price]
            h.serves = worth(h.expected, price) > value
            h.allowed = len(h.expected) if h.serves else r.lookup.allowed
        if self.name in step.plan.drafters and (passes := best[min(step.plan.k, k)]):
            return passes
        if canary:
            return 1 if self.since >= CANARY_EVERY else 0
        if self.since < self._probe_after(after, seconds):
            return 0
        return 1 + int((self.acceptance.rates[:-1].cumprod() > REACH).sum())

    def _probe_after(self, after: tuple[float, float] | None, step: float) -> float:
        """Steps of `step` seconds after which it is probed; `after`: what a probe takes, as `PassCost.after_rest`."""
        if self.acceptance.tries[0] < KNOWN:
            return EARLY_EVERY
        if after is None or step <= 0.0:
            return PROBE_EVERY
        return min(max(after[0] / (PROBE_SHARE * step), PROBE_LEAST), PROBE_MOST)

    def read(
        self,
        step: Step,
        tokens: Sequence[Sequence[int]],
        probs: Sequence[Sequence[float]] | None,
        confidence: Confidence,
        selection: Selection,
        most: int,
    ) -> list[Sequence[float]]:
        """Take what its passes gave and prefer it or suffix drafts again: per request of `step.asked`, the calibrated
        cumulative acceptance of the preferred proposal.
        """
        rates = self.acceptance.rates
        floor = 0.0 if selection.fixed else FLOOR
        preferred = []
        for r in step.asked:
            h = r.head
            h.clear()
            h.serves = False
            if chain := list(tokens[r.place][: r.room(most)]):
                each = probs[r.place] if probs is not None else rates
                h.draft = Draft(chain, np.cumprod(np.minimum(each[: len(chain)], 1.0)).tolist(), self.name, 1)
                h.expected, h.cells = confidence.cumulative(h.draft, floor)
                have = worth(r.lookup.expected, self._price) if step.uses_memory else 0.0
                h.serves = worth(h.expected, self._price) > have
            preferred.append(selection.cut(r, h, len(step.running)) if h.serves else r.lookup.expected[: r.lookup.kept])
        return preferred

    def score(self, r: Request, confidence: Confidence, scored: Scored | None) -> int:
        """Score its last proposal for the request against what the target emitted; as `Confidence.observe`.

        Calls `scored` with it; 0 where nothing was proposed.
        """
        h, emitted = r.head, r.emitted
        tokens = h.draft.token_ids
        if not tokens:
            return 0
        accepted, most = 0, min(len(tokens), len(emitted))
        while accepted < most and tokens[accepted] == emitted[accepted]:
            accepted += 1
        known = min(accepted + 1, most)
        h.record(accepted, known, self.acceptance.rates)
        self.acceptance.observe(accepted, known)
        length = r.verified if h.sent else most
        if scored is not None and length:
            scored(r.req_id, min(accepted, length), length)
        if h.cells:
            return confidence.observe(self.name, h.cells, tokens, emitted)
        return accepted if known > accepted or accepted == len(tokens) else ~accepted

    @property
    def reached(self) -> float | None:
        """Tokens per verify step that its own drafts would give; None before any was scored."""
        return 1.0 + float(self.acceptance.measured.cumprod().sum()) if self.acceptance.tries[0] else None

    # ---- its weights ------------------------------------------------------------------------------------------------

    def swapped(self, version: int, known: Mapping[str, Sequence[float]] | None, requests: Iterable[Request]) -> None:
        """Its weights are now those of `version`; `known`: their acceptance, where they ran before."""
        self.acceptance.changed()
        if known is None and self._remembered is not None and self._remembered[0] == version:
            known = self._remembered[1]
        if known is not None:
            self.acceptance.restore(known)
        self._remembered = None
        self.version = version
        for r in requests:
            r.head.accepted_sum = r.head.hoped = 0.0
        self.since = PROBE_EVERY

    def state(self) -> dict[str, Any]:
        """Its acceptance, and what its passes cost, in JSON types."""
        acceptance = {"version": self.version, "acceptance": self.acceptance.state()}
        return {"drafter": acceptance, "passes": self.cost.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take what an earlier run saved, or raise. Acceptance of another version waits until that is swapped in."""
        if (kept := state.get("drafter")) is not None:
            version = int(kept["version"])
            HeadAcceptance(self.k).restore(kept["acceptance"])  # raises before anything is taken
        if "passes" in state:  # not there where it was measured on another machine
            self.cost.restore(state["passes"])
        if kept is not None and version == self.version:
            self.acceptance.restore(kept["acceptance"])
        elif kept is not None:
            self._remembered = version, kept["acceptance"]
