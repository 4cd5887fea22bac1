"""Which optimiser steps are in some weights, where several trainings share one store of versions.

Every training has a name, and a version says of each training how many of its steps it holds: a vector clock. So two
trainings know what each has that the other has not, and meet in the average of their weights, by those steps: local
SGD (Stich, arXiv:1805.09767), weighted as in FedAvg (McMahan et al., arXiv:1602.05629). Of two that take turns, the one
that made no step since simply goes on from the other's weights.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

KEY = "trainings"
"""In the provenance of a version and in the record of a checkpoint: steps by training."""


def _name() -> str:
    return uuid.uuid4().hex[:12]


@dataclass
class Lineage:
    """The steps in the weights of one training: `own` ones, and those of `others` by name."""

    name: str = field(default_factory=_name)
    own: int = 0
    others: dict[str, int] = field(default_factory=dict)

    def steps(self) -> dict[str, int]:
        """Of every training, this one included."""
        return {**self.others, self.name: self.own} if self.own else dict(self.others)

    def share(self, theirs: Mapping[str, int]) -> float:
        """What part of an average belongs to weights with these steps: 0 where they have nothing new, 1 where these
        have nothing that is new to them, or nothing in common with them: weights that began apart are not averaged.
        """
        mine = self.steps()
        new = sum(max(0, n - mine.get(name, 0)) for name, n in theirs.items())
        if not new:
            return 0.0
        if mine.keys().isdisjoint(theirs):
            return 1.0
        return new / (new + sum(max(0, n - theirs.get(name, 0)) for name, n in mine.items()))

    def take(self, theirs: Mapping[str, int]) -> None:
        """The weights are the average with such ones now."""
        mine = self.steps()
        if mine and mine.keys().isdisjoint(theirs):  # dropped: what is trained from here on is another training
            self.name, self.own, mine = _name(), 0, {}
        most = {name: max(n, mine.get(name, 0)) for name, n in {**mine, **theirs}.items()}
        self.own = most.pop(self.name, self.own)
        self.others = most


def read(record: Mapping[str, Any]) -> dict[str, int]:
    """Steps by training, of a version's provenance; empty where it does not say."""
    found = record.get(KEY)
    if not isinstance(found, dict):
        return {}
    return {str(k): v for k, v in found.items() if isinstance(v, int) and v > 0}
