"""What the audit keeps of each sampled token: a few numbers computed from the target's whole distribution there.

The distributions themselves ([tokens, vocabulary], many GB for a real model) pass through in chunks and are dropped.
All tests rest on one fact. If every token is drawn from p(. | its prefix), then whatever happened before it,

    u = P(id < token) + U · p(token),   U uniform and independent        (randomised probability integral transform)

is uniform on [0, 1] and independent of the past; so is the same with tokens ordered by probability instead of id; and
`-log p(token) - H(p)`, `[token is the argmax] - max p` and `[token = i] - p_i` have mean 0 and known variances.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollspec.audit.statistics import Floats, Ints, merge_rare
from rollspec.errors import RollspecError

FLOOR = -87.0
"""Log-probabilities are not taken below this: exp of it is still a positive, normal float32."""

MIN_GROUP = 40
"""Samples of one exact prefix from which on its own table is kept."""


class AuditError(RollspecError, ValueError):
    """An audit that cannot be made: bad input, an engine that does not start, a reference that disagrees in size."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Sampled responses: token ids, number of the prompt, round, and log-probabilities if the engine reported them.
    Those of one prompt and round are siblings, in the order they were asked for.
    """

    tokens: tuple[Ints, ...]
    prompt: Ints
    round: Ints
    log_probs: tuple[Floats, ...] | None = None

    @property
    def n_tokens(self) -> int:
        """Sampled tokens in all."""
        return sum(map(len, self.tokens))


@dataclass(slots=True)
class PrefixTable:
    """Draws after one exact prefix: counts against probabilities, rare tokens merged into one cell."""

    n: int
    position: int
    cells: Ints  # [V] cell of each token
    probabilities: Floats  # [c]
    observed: Ints  # [c]


class Evidence:
    """Per-token statistics of `Samples`, filled by `add` in chunks of any size and order."""

    def __init__(self, samples: Samples, vocab: int, rng: np.random.Generator) -> None:
        self.samples, self.vocab, self.rng = samples, vocab, rng
        lengths = np.array([len(t) for t in samples.tokens], dtype=np.int64)
        self.start: Ints = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)  # [S + 1] first row of each
        n = int(self.start[-1])
        self.position: Ints = np.concatenate([np.arange(k) for k in lengths] or [np.zeros(0)]).astype(np.int64)  # [N]
        self.prefix = prefix_ids(samples)  # [N] equal where the whole prefix is
        self._prefix_count = np.bincount(self.prefix, minlength=1)
        self.tables: dict[int, PrefixTable] = {}
        self.seen = np.zeros(n, dtype=bool)
        rows: Floats = np.zeros((9, n))  # log_prob: of the sampled token; flat: mean over the vocabulary of -log p
        self.log_prob, self.entropy, self.flat, self.surprisal_variance, self.surprisal_third = rows[:5]
        self.is_argmax, self.p_max, self.pit, self.rank_pit = rows[5:]
        self._observed: Floats = np.zeros(vocab)
        self._powers: Floats = np.zeros((3, vocab))  # sums of p, p^2, p^3
        self._work: Any = np.empty((3, 0, vocab))

    def add(self, sequence: int, log_probs: Floats, first: int = 0) -> None:
        """Take the target's distributions for positions `first`, `first`+1, ... of one sequence.

        Args:
            log_probs: [n, V] normalised log-probabilities of the target at the sampling temperature. In float32 their
                sums over a vocabulary are off by 1e-6, and take half of float64's time.

        Raises:
            AuditError: a wrong vocabulary size, NaN, or rows that are not normalised.
        """
        n = len(log_probs)
        row = int(self.start[sequence]) + first
        rows = slice(row, row + n)
        tokens = self.samples.tokens[sequence][first : first + n]
        if log_probs.shape != (len(tokens), self.vocab):
            raise AuditError(
                f"rollspec: the reference gave {log_probs.shape} log-probabilities for {len(tokens)} tokens and a "
                f"vocabulary of {self.vocab}; use the reference model that belongs to the engine's."
            )
        if log_probs.dtype != self._work.dtype or n > self._work.shape[1]:
            # Kept: the zeroing of new memory took three quarters of the time.
            self._work = np.empty((3, n, self.vocab), dtype=log_probs.dtype)
        at = np.arange(n)
        lp, p, work = self._work[:, :n]
        np.maximum(log_probs, FLOOR, out=lp)  # NaN stays NaN
        np.exp(lp, out=p)
        total = p.sum(-1)
        if not np.all(np.abs(total - 1) < 1e-4):
            raise AuditError(
                "rollspec: the reference's log-probabilities are NaN or do not sum to one, so nothing can be tested "
                "against them; check the model's weights."
            )
        p /= total[:, None]
        p_own = p[at, tokens].astype(np.float64)
        entropy = -np.multiply(p, lp, out=work).sum(-1)  # pairwise: nothing small is lost in float32
        self.log_prob[rows] = np.maximum(log_probs[at, tokens], -700.0)  # finite
        self.entropy[rows], self.flat[rows] = entropy, -lp.mean(-1)
        self.is_argmax[rows], self.p_max[rows] = p.argmax(-1) == tokens, p.max(-1)
        own = lp[at, tokens]
        # Likelier tokens, and equally likely ones with a smaller id.
        ties = np.array([np.count_nonzero(lp[i, :token] == own[i]) for i, token in enumerate(tokens)])
        above = np.where(lp > own[:, None], p, 0).sum(-1) + ties * p_own
        before = np.array([p[i, :token].sum() for i, token in enumerate(tokens)])
        self.pit[rows] = before + self.rng.random(n) * p_own
        self.rank_pit[rows] = above + self.rng.random(n) * p_own
        for i in np.flatnonzero(self._prefix_count[self.prefix[rows]] >= MIN_GROUP):
            self._count(int(self.prefix[row + i]), int(self.position[row + i]), int(tokens[i]), p[i])
        lp += entropy[:, None]  # less the surprisal's excess over its mean
        np.multiply(p, lp, out=work)
        work *= lp
        self.surprisal_variance[rows] = work.sum(-1)
        work *= lp
        self.surprisal_third[rows] = -work.sum(-1)
        np.add.at(self._observed, tokens, 1)
        for power, x in enumerate((p, np.multiply(p, p, out=work), np.multiply(work, p, out=lp))):
            self._powers[power] += x.sum(0)
        self.seen[rows] = True

    @property
    def token_moments(self) -> Floats:
        """[4, V] per token id: times observed; mean, variance and third central moment of that."""
        first, second, third = self._powers
        return np.stack([self._observed, first, first - second, first - 3 * second + 2 * third])

    def _count(self, prefix: int, position: int, token: int, p: Floats) -> None:
        if prefix not in self.tables:
            n = int(self._prefix_count[prefix])
            cells = merge_rare(p, n)
            merged: Floats = np.bincount(cells, weights=p).astype(np.float64)
            self.tables[prefix] = PrefixTable(n, position, cells, merged, np.zeros(len(merged), dtype=np.int64))
        table = self.tables[prefix]
        table.observed[table.cells[token]] += 1


def prefix_ids(samples: Samples) -> Ints:
    """[N] numbers that are equal exactly where prompt and all earlier response tokens are."""
    nodes: dict[tuple[int, int], int] = {}
    out: list[int] = []
    for prompt, tokens in zip(samples.prompt.tolist(), samples.tokens, strict=True):
        node = nodes.setdefault((-1, prompt), len(nodes))
        for token in tokens.tolist():
            out.append(node)
            node = nodes.setdefault((node, token), len(nodes))
    return np.array(out, dtype=np.int64)


def samples_from(
    tokens: Sequence[Sequence[int]],
    prompt: Sequence[int],
    rounds: Sequence[int] | None = None,
    log_probs: Sequence[Sequence[float]] | None = None,
) -> Samples:
    """`Samples` from plain lists; one round where none is given."""
    return Samples(
        tuple(np.asarray(t, dtype=np.int64) for t in tokens),
        np.asarray(prompt, dtype=np.int64),
        np.asarray(rounds if rounds is not None else [0] * len(tokens), dtype=np.int64),
        tuple(np.asarray(p, dtype=np.float64) for p in log_probs) if log_probs is not None else None,
    )
