"""Calibrates a drafter's frequencies to acceptance probabilities, from the tokens that the target emitted.

The rate at which the next draft token is accepted is counted per (drafter, match length, frequency). A one-hot
proposal x is accepted with probability p(x), which is also the chance that the target samples x by itself, so every
chain is scored against the tokens that were emitted, verified or not.

Which tokens are verified is chosen by these very probabilities, so those that are too high are chosen more often (the
winner's curse). What was accepted over what was predicted, per drafter, is therefore a factor of every prediction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import numpy as np

from rollspec.proposal.base import Draft
from rollspec.tuning.strategy import restored

_MATCH_EDGES = (2, 3, 5, 9, 17)  # match lengths 1, 2, 3-4, 5-8, 9-16, 17+
_FREQ_EDGES = (0.25, 0.45, 0.65, 0.85, 0.985)
_FREQ_MEANS = (0.2, 0.35, 0.55, 0.75, 0.9, 0.99)
_COLUMNS = len(_FREQ_EDGES) + 1
_CELLS = (len(_MATCH_EDGES) + 1) * _COLUMNS
_MATCH_BASE = [sum(m >= e for e in _MATCH_EDGES) * _COLUMNS for m in range(_MATCH_EDGES[-1] + 1)]
_FREQ_COLUMN = [sum(f / 200 >= e for e in _FREQ_EDGES) for f in range(201)]

PRIOR_WEIGHT = 6.0  # observations the raw frequency counts for, before there are any
MEMORY = 1000.0  # observations per cell after which the past is halved, so that a drifting policy is followed


VERIFIED_PRIOR = 30.0
"""Tokens that count as predicted and accepted before there are any, and again when none are verified for long."""

FADE = 1.0 / 2000.0  # share of what verified drafts showed that is forgotten with every proposal


class Confidence:
    """Calibration table: one row of cells per drafter."""

    def __init__(self) -> None:
        self._tables: dict[str, _Table] = {}

    def cumulative(self, draft: Draft, floor: float) -> tuple[list[float], list[int]]:
        """Calibrated probability, per token, that it and all before it are accepted; and the table cells used.

        The chain ends with the first token below `floor`, which is kept so that its cell may rise again.
        """
        table = self._tables.get(draft.source)
        if table is None:
            table = self._tables[draft.source] = _Table()
        rate, factor = table.rate, table.factor
        bases = chain(_MATCH_BASE[draft.match_len :], repeat(_MATCH_BASE[-1]))  # a match is longer by each token
        before = cumulative = 1.0
        out: list[float] = []
        cells: list[int] = []
        for p, base in zip(draft.probs, bases):  # noqa: B905 - the second has no end
            cell = base + _FREQ_COLUMN[int(p / before * 200) if p < before else 200]
            cumulative *= rate[cell]
            out.append(cumulative * factor)
            cells.append(cell)
            if cumulative * factor < floor:
                break
            before = p
        return out, cells

    def verified(self, source: str, predicted: float, accepted: int) -> None:
        """Of a draft of `source`, `accepted` tokens were accepted where `predicted` were expected."""
        if (table := self._tables.get(source)) is not None:
            table.predicted += predicted / table.factor  # `predicted` has the factor in it
            table.outcome += accepted

    def observe(self, source: str, cells: Sequence[int], proposed: Sequence[int], emitted: Sequence[int]) -> int:
        """Score the chain `proposed` (with its `cells`) against what the target then emitted: the number of its leading
        tokens that were; `~accepted` (negative) where the next one is unknown, as all that was emitted was proposed.
        """
        table = self._tables[source]
        table.predicted += (VERIFIED_PRIOR - table.predicted) * FADE  # drafts no longer verified are tried again
        table.outcome += (VERIFIED_PRIOR - table.outcome) * FADE
        add, accepted = table.add, 0
        for cell, guess, token in zip(cells, proposed, emitted):  # noqa: B905 - the shortest ends what is known
            if guess != token:
                add(cell, 0.0)
                return accepted
            add(cell, 1.0)
            accepted += 1
        return accepted if accepted == len(cells) else ~accepted

    def state(self) -> dict[str, Any]:
        """Accepted and tried tokens per drafter, and what verified drafts showed, in JSON types."""
        return {
            source: {"accepted": t.accepted, "tries": t.tries, "verified": [t.outcome, t.predicted]}
            for source, t in self._tables.items()
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state`. Raises ValueError if the numbers cannot be used."""
        tables: dict[str, _Table] = {}
        for source, row in state.items():
            like = {"accepted": np.empty(_CELLS), "tries": np.empty(_CELLS), "verified": np.empty(2)}
            accepted, tries, verified = (x.tolist() for x in restored(row, like).values())
            if not all(a <= t and 0.0 < t <= MEMORY for a, t in zip(accepted, tries, strict=True)) or not verified[1]:
                raise ValueError(f"the calibration of {source!r} has numbers that cannot be")
            table = tables[str(source)] = _Table()
            table.accepted, table.tries = accepted, tries
            table.rate = [a / t for a, t in zip(accepted, tries, strict=True)]
            table.outcome, table.predicted = verified
        self._tables = tables


class _Table:
    """Accepted and tried tokens per cell, with the resulting rate kept ready for the step path.

    `outcome` of the `predicted` tokens of verified drafts were accepted.
    """

    __slots__ = ("accepted", "outcome", "predicted", "rate", "tries")

    def __init__(self) -> None:
        prior = [_FREQ_MEANS[i % _COLUMNS] for i in range(_CELLS)]
        self.rate = list(prior)
        self.tries = [PRIOR_WEIGHT] * _CELLS
        self.accepted = [PRIOR_WEIGHT * p for p in prior]
        self.outcome = self.predicted = VERIFIED_PRIOR

    @property
    def factor(self) -> float:
        """Tokens accepted of verified drafts over those that the cells alone predict; at most 1."""
        return min(max(self.outcome / self.predicted, 0.05), 1.0)

    def add(self, cell: int, share: float) -> None:
        tries = self.tries[cell] + 1.0
        accepted = self.accepted[cell] + share
        if tries > MEMORY:
            tries *= 0.5
            accepted *= 0.5
        self.tries[cell] = tries
        self.accepted[cell] = accepted
        self.rate[cell] = accepted / tries
