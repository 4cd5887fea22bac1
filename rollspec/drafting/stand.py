"""STAND (arXiv:2506.04708): stochastic adaptive n-gram drafting, for reasoning traces that repeat their own phrases.

A table maps each n-gram of the trajectories of one prompt to a distribution over the next token, which is averaged over
the n-gram's occurrences: at the (k+1)-th one,  P <- k/(k+1) P + 1/(k+1) p,  of which the ten likeliest tokens are kept.
A draft token is sampled from the longest n-gram that is known, by the Gumbel trick on noise that was drawn beforehand:

    x = argmax_y  log P(y) + g_y,     g_y = -log(-log u_y)

Simplified, because a step sees emitted tokens and no logits: p is one-hot at the emitted token, so P is the share of
the counts. The paper samples a tree (Gumbel top-k, its shape fitted to data); vLLM verifies chains, so one token is
drawn per position. A prompt's table holds one policy version's trajectories: the request's own and its siblings'.

Exactness: vLLM is handed token ids, which it verifies as one-hot proposals, so a token is accepted with the target's
p(x) however it was chosen; the noise is ours and none of the target's. The paper keeps P for the acceptance test
min(1, p/P), which accepts Σ min(p, P); verified as one-hot, sampling accepts Σ p P, and so less than the most frequent
token would. That is the method as published but for the test, and it is calibrated like any other draft.
"""

from __future__ import annotations

import math

import numpy as np

from rollspec.config import RollspecConfig
from rollspec.drafting.base import Draft, register_drafter
from rollspec.drafting.requests import Request
from rollspec.drafting.siblings import SiblingNgrams
from rollspec.proposal.history import History
from rollspec.proposal.ngrams import UNSEEN, Row

LENGTHS = (1, 2, 3)
"""Tokens of context: bigrams to 4-grams, the longest known one first."""

NOISE = 1 << 14
"""Gumbel variables drawn beforehand."""


@register_drafter("stand")
class Stand(SiblingNgrams):
    """Samples from what followed the longest known n-gram; the same place of the same sample draws the same noise."""

    lengths = LENGTHS

    def __init__(self, name: str, config: RollspecConfig, history: History) -> None:
        super().__init__(name, config, history)
        self.noise: list[float] = np.random.default_rng(0).gumbel(size=NOISE).tolist()

    def propose(self, r: Request, room: int) -> Draft | None:
        """A sampled chain."""
        table, number = self.running[r.req_id]
        start = len(r.output)

        def draw(row: Row, place: int) -> tuple[int, float]:
            token, total = next(iter(row)), sum(row.values())
            if len(row) > 1:
                noise, at = self.noise, start + place
                token = max(row, key=lambda y: math.log(row[y]) + noise[hash((number, at, y)) % NOISE])
            return token, row[token] / (total + UNSEEN)

        tokens, probs, matched = table.ngrams.follow(r.tail(max(LENGTHS)), room, draw)
        return Draft(tokens, probs, self.name, matched)
