"""Learned stopping: a small online regressor says for each draft token whether it will be accepted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollspec.drafting.requests import Proposal, Request
from rollspec.drafting.stopping import StopRule, register_rule
from rollspec.tuning.policy import Vector
from rollspec.tuning.tuner import LEARNED

THRESHOLD = 0.4
"""Of acceptance, below which the draft ends: the default of `assistant_confidence_threshold` in transformers, which
names DISCO as its source.
"""

RATE = 0.1
"""Step size of AdaGrad, before it falls with what was learned."""

FEATURES = ("bias", "calibrated", "position", "drafter", "match", "head", "batch")


@register_rule("disco")
class Disco(StopRule):
    """DISCO (Mamou et al., arXiv:2405.04304) with features that are at hand; AdaEAGLE (arXiv:2412.18910) has its aim.

    For the i-th draft token, given that those before it are accepted,

        p_i = σ(w · x_i),  x_i = (1, logit c_i, log2 i, logit q_i, log2 match, head or not, log2 batch)

    with c_i the calibrated chance of acceptance and q_i the drafter's own; the draft ends before the first p_i below
    `THRESHOLD`. w starts at p_i = c_i and follows the gradient of the log loss on every known token, verified or not.
    Simplified: of both papers abstract and summaries were read. They name a classifier that decides whether to draft
    on, not its features or its threshold, so these are ours, and it learns online. AdaEAGLE's predictor of the length,
    before anything is drafted and from the model's state, is left out: drafts of memory have no such state. w is not
    kept with the job.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(lengths)
        self.weights: Vector = np.array([name == "calibrated" for name in FEATURES], float)
        self._squares: Vector = np.zeros(len(FEATURES))

    def keep(self, r: Request, p: Proposal, batch: int) -> int:  # noqa: D102
        if not p.expected:
            return 0
        unsure = _sigmoid(features(p, batch) @ self.weights) < THRESHOLD
        return int(unsure.argmax()) if unsure.any() else len(p.expected)

    def learn(self, r: Request, p: Proposal, accepted: int, known: int, verified: int, batch: int) -> None:  # noqa: D102
        if not known:
            return
        x = features(p, batch)[:known]
        gradient = x.T @ (_sigmoid(x @ self.weights) - (np.arange(len(x)) < accepted))
        self._squares += gradient**2
        self.weights -= RATE * gradient / np.sqrt(self._squares + 1e-6)


def features(p: Proposal, batch: int) -> Vector:
    """x of each token of a proposal. Shape [tokens, features]."""
    n = len(p.expected)
    position = np.arange(1.0, n + 1.0)
    ones = np.ones(n)
    columns = (
        ones,
        _logit(_each(p.expected)),
        np.log2(position),
        _logit(_each(p.draft.probs[:n])),
        np.log2(p.draft.match_len + position),
        ones * (p.draft.source in LEARNED),
        ones * np.log2(max(batch, 1)),
    )
    x: Vector = np.stack(columns, axis=1)
    return x


def _each(cumulative: Sequence[float]) -> Vector:
    """Probability of each token given those before it, from cumulative ones."""
    p = np.array(cumulative, float)
    before = np.concatenate([[1.0], p[:-1]])
    out: Vector = np.divide(p, before, out=np.zeros_like(p), where=before > 0)
    return out


def _logit(p: Vector) -> Vector:
    p = np.clip(p, 0.01, 0.99)
    out: Vector = np.log(p / (1.0 - p))
    return out


def _sigmoid(z: Vector) -> Vector:
    out: Vector = 1.0 / (1.0 + np.exp(-np.clip(z, -30.0, 30.0)))
    return out
