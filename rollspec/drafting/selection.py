"""Selects the draft tokens to verify: the step's budget over all requests, with more for those that run long.

`proposal/budget.py` has the arithmetic; here is what it is applied to in a step.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollspec.config import BudgetConfig
from rollspec.drafting.requests import Proposal, Request, Step
from rollspec.drafting.stopping import RULES, StopRule
from rollspec.proposal import budget, lengths
from rollspec.tuning.cost import CostModel

FLOOR = 0.03
"""Chains end below this chance of acceptance at the latest: no step is so cheap per token that it would pay."""

MARGIN = 0.1
"""A draft token has to gain this much more than it costs. Prices and chances of acceptance are predicted to within
about so much, and of many predictions the highest are chosen, which are the ones most likely too high; in a large
batch, where a token that is accepted saves hardly more than it costs, that would lose time.
"""

LEAST = 0.02
"""A step that would be faster by less, per token, verifies nothing: what it takes is not known so well."""

TETRIS_EXTRA = 2  # draft tokens per request that `tetris` asks for beyond those that it verifies on average
LENGTHS_EVERY = 16  # tokens after which a request's expected length is looked at again


class Selection:
    """The verification budget of one engine. `arms`: the tuner's draft lengths."""

    def __init__(self, config: BudgetConfig, arms: Sequence[int] = ()) -> None:
        self.config = config
        self.fixed = config.rule != "goodput"
        self.rule: StopRule | None = RULES[config.rule](arms) if config.rule in RULES else None
        self.refill = lengths.Refill()

    def price(self, batch: int, cost: CostModel, context_tokens: float) -> float:
        """Acceptance below which a draft token cannot pay; 0 where everything is verified."""
        return 0.0 if self.fixed else max(FLOOR, budget.floor(batch, cost, context_tokens, MARGIN))

    def floor(self, batch: int, cost: CostModel, context_tokens: float) -> float:
        """Acceptance at which model-free proposals end."""
        price = self.price(batch, cost, context_tokens)
        return price / lengths.LIMITS[1] if self._power() else price  # what counts double pays at half the chance

    def cut(self, r: Request, p: Proposal, batch: int) -> Sequence[float]:
        """`p.expected`, up to where the rule of `budget.rule` ends the draft."""
        p.kept = self.rule.keep(r, p, batch) if self.rule is not None and p.expected else len(p.expected)
        return p.expected[: p.kept]

    def learn(self, r: Request, lookup_accepted: int, head_accepted: int, batch: int) -> None:
        """Tell the rule what became of the request's proposals; the numbers as `Confidence.observe` returns them."""
        if self.rule is None:
            return
        sent = r.head if r.head.sent else r.lookup
        for p, found in ((r.lookup, lookup_accepted), (r.head, head_accepted)):
            if p.cells:
                accepted = found if found >= 0 else ~found
                known = min(accepted + (found >= 0), len(p.expected))
                self.rule.learn(r, p, accepted, known, r.verified if p is sent else 0, batch)

    def finish(self, r: Request) -> None:
        """The request ended or was aborted."""
        if self.rule is not None:
            self.rule.finish(r)

    def allot(self, drafts: Sequence[Sequence[float]], step: Step, cost: CostModel) -> list[int]:
        """Tokens of each draft of `step.asked` that are worth verifying, before the arm's own limit.

        `drafts`: cumulative acceptance per token. Those that were asked may be a sample, as the step's plan says.
        """
        batch, asked = len(step.running), step.asked
        if self.config.rule == "tetris" and step.plan.k:
            return budget.likeliest(drafts, len(asked) * max(step.plan.k - TETRIS_EXTRA, 1))
        if self.fixed or not any(drafts):
            return [len(probs) for probs in drafts]
        weights = None
        if (power := self._power()) and len(asked) > 1:
            weights = lengths.weights([_remaining(r) for r in asked], power)
        copies = batch / len(asked) if step.plan.watch else 1.0
        return budget.allocate(drafts, batch, cost, step.context_tokens, weights, copies, MARGIN, LEAST)

    def _power(self) -> float:
        """How much more the long requests count now."""
        power = self.config.length_weight * (1.0 - self.refill.rate)
        return power if power > 0.05 else 0.0


def _remaining(r: Request) -> float:
    """Expected tokens until the request's end."""
    m, length = r.suffix, len(r.output)
    if length >= m.remaining_at:
        m.remaining = lengths.remaining(length, m.ended, r.max_tokens)
        m.remaining_at = length + LENGTHS_EVERY
    return m.remaining
