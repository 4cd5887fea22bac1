"""STAND and Consensus: n-grams of a request and its siblings, one table per prompt and policy version.

Both published ones know the probabilities that the model gave its tokens. A step sees emitted tokens and no logits, so
here an observation counts one; and vLLM verifies chains, so the tree's likeliest path is the draft.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from rollspec.config import RollspecConfig
from rollspec.drafting.base import Draft, Drafter, register_drafter
from rollspec.drafting.requests import Request
from rollspec.drafting.suffix import CORPUS_BYTES
from rollspec.proposal.history import History
from rollspec.proposal.ngrams import ROW_BYTES, UNSEEN, PromptTable, PromptTables, Row

VOTERS = 64  # siblings that are counted apart; with more than 64 of one prompt, every 64th shares a count
NOISE = 1 << 14  # Gumbel variables that STAND draws beforehand


class SiblingNgrams(Drafter):
    """Keeps the tables; what is proposed from them is a subclass's."""

    lengths: ClassVar[tuple[int, ...]]  # of the contexts, in tokens
    votes: ClassVar[bool] = False
    """Whether a row holds which siblings emitted a follower, instead of how often it was emitted."""

    def __init__(self, name: str, config: RollspecConfig, history: History) -> None:
        self.name = name
        self.tables = PromptTables(CORPUS_BYTES * history.max_bytes // ROW_BYTES, *self.lengths)
        self.running: dict[str, tuple[PromptTable, int]] = {}
        """Request -> the table that it shares, and its number in there."""

    def begin(self, r: Request) -> None:
        """Join the prompt's table, with the tokens that the request starts from."""
        table = self.tables.open(r.key, r.version)
        self.running[r.req_id] = table, table.joined
        self._add(r, len(r.output) - (r.known if table.joined > 1 else 0))

    def observe(self, r: Request) -> None:
        """Add what was emitted."""
        self._add(r, len(r.emitted))

    def propose(self, r: Request, room: int) -> Draft | None:
        """The chain of what `choose` finds in the table."""
        table, number = self.running[r.req_id]
        start = len(r.output)
        tokens, probs, matched = table.ngrams.follow(
            r.tail(max(self.lengths)), room, lambda row, place: self.choose(row, number, start + place)
        )
        return Draft(tokens, probs, self.name, matched)

    def choose(self, row: Row, number: int, place: int) -> tuple[int, float]:
        """A follower and its probability, at a place of the response of a table's `number`-th request."""
        raise NotImplementedError

    def finish(self, r: Request) -> None:
        """Leave the table."""
        self.tables.close(self.running.pop(r.req_id)[0], r.private)

    def _add(self, r: Request, new: int) -> None:
        table, number = self.running[r.req_id]
        # The prompt is a context, and no follower: the target did not say it.
        voter = 1 << number % VOTERS if self.votes else 0
        table.ngrams.add(r.tail(max(self.lengths) + new), new, voter)


@register_drafter("stand")
class Stand(SiblingNgrams):
    """STAND (arXiv:2506.04708): stochastic n-gram drafting, for reasoning traces that repeat their own phrases.

    A draft token is sampled from what followed the longest known n-gram, bigrams to 4-grams, by the Gumbel trick on
    noise that was drawn beforehand; the same place of the same sample draws the same noise:

        x = argmax_y  log P(y) + g_y,     g_y = -log(-log u_y)

    vLLM verifies token ids as one-hot proposals, so a token is accepted with the target's p(x) however it was chosen.
    The paper's acceptance test min(1, p/P) accepts Σ min(p, P); sampled and verified as one-hot, Σ p P.
    """

    lengths = (1, 2, 3)

    def __init__(self, name: str, config: RollspecConfig, history: History) -> None:
        super().__init__(name, config, history)
        self.noise: list[float] = np.random.default_rng(0).gumbel(size=NOISE).tolist()

    def choose(self, row: Row, number: int, place: int) -> tuple[int, float]:
        """A sample."""
        token, total = next(iter(row)), sum(row.values())
        if len(row) > 1:
            noise = self.noise
            token = max(row, key=lambda y: math.log(row[y]) + noise[hash((number, place, y)) % NOISE])
        return token, row[token] / (total + UNSEEN)


@register_drafter("consensus")
class Consensus(SiblingNgrams):
    """Consensus drafts (Speculative Decoding for Multi-Sample Inference, arXiv:2503.05330): the siblings vote.

    The last tokens of a sample are looked up in the other samples of its prompt, and what most of them emitted next is
    drafted. The look-up is repeated with the drafted token in the suffix, so a sibling joins the vote where its text
    meets the draft and leaves it where it differs, as in the paper's graph; its length of the suffix was not looked up.

        votes(y) = siblings that emitted y after these tokens,    x = argmax votes,    P(x) = votes(x) / all that voted

    A sibling has one vote per token however often it repeats itself, and the request's own text has none.
    """

    lengths = (3,)
    votes = True

    def choose(self, row: Row, number: int, place: int) -> tuple[int, float]:
        """What wins the vote."""
        others = ~(1 << number % VOTERS)
        winner, most, voters = 0, 0, 0
        for token, who in row.items():
            who &= others
            voters |= who
            if (votes := who.bit_count()) > most:
                winner, most = token, votes
        return winner, most / (voters.bit_count() + UNSEEN)
