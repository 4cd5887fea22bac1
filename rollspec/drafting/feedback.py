"""The outcome of a step's proposals for the tuner: per request, the draft length allowed and the tokens emitted.

Every proposal is scored against what the target emitted, verified or not, so that the tuner learns of every arm: of
those without the draft head from memory's proposals, of those with it from whichever was preferred.
"""

from __future__ import annotations

from rollspec.drafting.requests import Request
from rollspec.tuning.policy import Vector
from rollspec.tuning.tuner import Plan, Rows, Tuner, View


class Feedback:
    """Rows of one step. `pass_seconds`: what the head's passes take under each arm, [arms]; None without a head."""

    def __init__(self, pass_seconds: Vector | None) -> None:
        self.rows = Rows()
        self.head = View(seconds=pass_seconds) if pass_seconds is not None else None
        self.decoding = 0  # requests that went through the step with a chance of a draft

    def add(self, r: Request, accepted: int, head_accepted: int) -> None:
        """Add a request, with the leading tokens of memory's and of the head's proposal that the target emitted, as
        `Confidence.observe` gives them.
        """
        self.decoding += len(r.output) > r.began_at
        if not r.asked:
            return
        p = r.lookup
        self.rows.add(p.allowed, accepted, p.expected)
        if (view := self.head) is not None:
            h = r.head
            expected = p.expected
            if h.serves:  # where it was not run, what it was expected to do
                accepted, expected = head_accepted if h.draft.token_ids else ~0, h.expected
            view.add(h.allowed, accepted, expected)
            view.served.append(h.serves)

    def teach(self, tuner: Tuner, plan: Plan, context_tokens: float, measured: float | None = None) -> None:
        """Tell the tuner what came of the step that `plan` decided, and the seconds that it took if they are known."""
        tuner.observe(plan, self.decoding, context_tokens, self.rows, self.head, measured)
