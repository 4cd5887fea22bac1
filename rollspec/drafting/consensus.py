"""Consensus drafts (Speculative Decoding for Multi-Sample Inference, arXiv:2503.05330): the siblings of a request vote.

The last k tokens of a sample are looked up in the other samples of its prompt, and what these emitted next is
aggregated: the token that most siblings agree on is drafted. The look-up is repeated with the drafted token in the
suffix, so a sibling joins the vote where its text meets the draft and leaves it where it differs: the paths are merged
where they agree, as in the paper's graph.

    votes(y) = siblings that emitted y after the k tokens,    x = argmax votes,    P(x) = votes(x) / siblings that voted

What differs from counting n-grams: a sibling has one vote per token however often it repeats itself, and the request's
own text has none.

Simplified: the paper weighs its graph's edges by the probabilities that the model gave the tokens, of which a step sees
none, so a vote counts one; how far the paper goes along its graph, and its k, were not looked up.
"""

from __future__ import annotations

from rollspec.drafting.base import Draft, register_drafter
from rollspec.drafting.requests import Request
from rollspec.drafting.siblings import VOTERS, SiblingNgrams
from rollspec.proposal.ngrams import UNSEEN, Row

SUFFIX = 3
"""Tokens that are looked up in the siblings (the paper's k)."""


@register_drafter("consensus")
class Consensus(SiblingNgrams):
    """Drafts what most siblings emitted after the same tokens."""

    lengths = (SUFFIX,)
    votes = True

    def propose(self, r: Request, room: int) -> Draft | None:
        """The chain that wins the vote at each place."""
        table, number = self.running[r.req_id]
        others = ~(1 << number % VOTERS)

        def elect(row: Row, place: int) -> tuple[int, float]:
            winner, most, voters = 0, 0, 0
            for token, who in row.items():
                who &= others
                voters |= who
                if (votes := who.bit_count()) > most:
                    winner, most = token, votes
            return winner, most / (voters.bit_count() + UNSEEN)

        tokens, probs, matched = table.ngrams.follow(r.tail(SUFFIX), room, elect)
        return Draft(tokens, probs, self.name, matched)
