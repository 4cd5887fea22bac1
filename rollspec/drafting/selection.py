"""What of the proposals is worth verifying: the step's budget over all requests, more for those that run long.

`proposal/budget.py` has the arithmetic; here is what it is applied to in a step.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollspec.config import BudgetConfig
from rollspec.drafting.requests import Request, Step
from rollspec.proposal import budget, lengths
from rollspec.proposal.base import Draft
from rollspec.tuning.cost import CostModel

FLOOR = 0.03
"""Chains end below this chance of acceptance at the latest: no step is so cheap per token that it would pay."""

LENGTHS_EVERY = 16
"""Tokens after which a request's expected length is looked at again."""


class Selection:
    """The verification budget of one engine."""

    def __init__(self, config: BudgetConfig) -> None:
        self.config = config
        self.fixed = config.policy != "goodput"
        self.refill = lengths.Refill()

    def price(self, batch: int, cost: CostModel, context_tokens: float) -> float:
        """Acceptance below which a draft token cannot pay; 0 where everything is verified."""
        return 0.0 if self.fixed else max(FLOOR, budget.floor(batch, cost, context_tokens))

    def floor(self, batch: int, cost: CostModel, context_tokens: float) -> float:
        """Acceptance at which proposals of memory end."""
        price = self.price(batch, cost, context_tokens)
        return price / lengths.LIMITS[1] if self._power() else price  # what counts double pays at half the chance

    def cut(self, draft: Draft, expected: Sequence[float]) -> Sequence[float]:
        """`expected`, up to where the drafter is unsure by `budget.policy`."""
        if self.config.policy == "svip":
            return expected[: budget.svip_cut(draft.probs)]
        if self.config.policy == "specdec++":
            return expected[: budget.specdec_cut(expected)]
        return expected

    def allot(self, chains: Sequence[Sequence[float]], step: Step, cost: CostModel) -> list[int]:
        """Tokens of each chain of `step.asked` that are worth verifying, before the arm's own limit.

        Args:
            chains: cumulative acceptance per token, one chain per request of `step.asked`.
            step: its plan says of how many requests those that were asked are a sample.
            cost: predicts the step's duration.
        """
        if self.fixed or not any(chains):
            return [len(chain) for chain in chains]
        batch, asked = len(step.running), step.asked
        weights = None
        if (power := self._power()) and len(asked) > 1:
            weights = lengths.weights([_remaining(r) for r in asked], power)
        copies = batch / len(asked) if step.plan.watch else 1.0
        return budget.allocate(chains, batch, cost, step.context_tokens, weights, copies)

    def _power(self) -> float:
        """How much more the long requests count now."""
        power = self.config.length_weight * (1.0 - self.refill.rate)
        return power if power > 0.05 else 0.0


def _remaining(r: Request) -> float:
    """Expected tokens until the request's end."""
    m, length = r.memory, len(r.output)
    if length >= m.remaining_at:
        m.remaining = lengths.remaining(length, m.ended, r.max_tokens)
        m.remaining_at = length + LENGTHS_EVERY
    return m.remaining
