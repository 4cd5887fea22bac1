"""Token Recycling (arXiv:2408.08696): drafts from an adjacency matrix of candidate tokens, one row per token.

The draft walks the matrix from the last token of the text: x1 = M[x0, 0], x2 = M[x1, 0], ... After the verify step the
rows of the tokens that it went through are updated, and the next request starts from it (the paper's hot start).

Simplified: a step sees emitted tokens, and not the target's latest top k. So candidates are ranked by what was emitted
after x, with the latest observation counting most,

    w[x, y] <- (1 - RATE) w[x, y] + RATE [y was emitted after x],     M[x] = the k largest of w[x]

Of the paper's tree vLLM verifies one chain, that of the best candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollspec.config import RollspecConfig
from rollspec.drafting.base import Draft, Drafter, register_drafter
from rollspec.drafting.requests import Request
from rollspec.proposal.history import History
from rollspec.proposal.ngrams import MIN_PROB, UNSEEN

CANDIDATES = 8  # kept per token, as in the paper (k)
RATE = 0.25  # of the latest observation in a candidate's weight


class Adjacency:
    """Candidates per token, best first: a sparse [vocabulary, k]."""

    def __init__(self) -> None:
        self._weights: dict[int, dict[int, float]] = {}
        self.best: dict[int, tuple[int, float]] = {}  # token -> its best candidate and that one's share of the weights

    def add(self, text: Sequence[int], new: int) -> None:
        """The last `new` tokens of `text` were emitted, each after the one before it."""
        for at in range(max(1, len(text) - new), len(text)):
            token, follower = text[at - 1], text[at]
            row = self._weights.setdefault(token, {})
            for candidate in row:
                row[candidate] *= 1.0 - RATE
            row[follower] = row.get(follower, 0.0) + RATE
            if len(row) > CANDIDATES:
                del row[min(row, key=row.__getitem__)]
            best = max(row, key=row.__getitem__)
            self.best[token] = best, row[best] / (sum(row.values()) + RATE * UNSEEN)

    def walk(self, token: int, room: int) -> tuple[list[int], list[float]]:
        """The chain of best candidates after `token`, and its cumulative shares."""
        tokens: list[int] = []
        probs: list[float] = []
        cumulative = 1.0
        while len(tokens) < room and (step := self.best.get(token)) is not None:
            token = step[0]
            cumulative *= step[1]
            if cumulative < MIN_PROB:
                break
            tokens.append(token)
            probs.append(cumulative)
        return tokens, probs


@register_drafter("token_recycling")
class TokenRecycling(Drafter):
    """Walks one matrix that all requests of the engine update."""

    def __init__(self, name: str, config: RollspecConfig, history: History) -> None:
        self.name = name
        self.matrix = Adjacency()

    def observe(self, r: Request) -> None:
        """Update the rows that the emitted tokens went through; a private request's text is not kept."""
        if not r.private:
            self.matrix.add(r.tail(len(r.emitted) + 1), len(r.emitted))

    def propose(self, r: Request, room: int) -> Draft | None:
        """The chain of best candidates after the last token."""
        tokens, probs = self.matrix.walk(r.tail(1)[0], room)
        return Draft(tokens, probs, self.name, 1)
