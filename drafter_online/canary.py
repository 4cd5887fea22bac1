"""Whether a drafter's new weights are promoted: the first drafts made with them against what the old ones reached.

The old weights' acceptance per position is the one measured when they were replaced. Each draft of the new ones is
scored against the tokens that the target then emitted, verified or not, and only for requests whose drafter KV was
written by the new weights: stale KV would lower their acceptance. The verdict is by the sum of accepted tokens over the
sum that the old weights would have had accepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]

EARLY = 0.25
"""Part of the drafts after which a version that reaches less than `EARLY_RATIO` of the old one is rolled back."""

EARLY_RATIO = 0.25

SLACK = 0.02
"""Accepted tokens per draft that the new weights may lack where the old ones reached next to nothing."""

CanaryVerdict = Literal["promoted", "rolled_back"]


@dataclass
class Canary:
    """The canary of version `version`.

    `rates`: the old weights' acceptance per position [k]. `drafts`: scored drafts until the verdict. `ratio`: part of
    the old weights' accepted tokens that must be reached.
    """

    version: int
    rates: Vector
    drafts: int
    ratio: float
    seen: int = 0
    accepted: float = 0.0
    expected: float = 0.0

    def observe(self, accepted: int, length: int) -> CanaryVerdict | None:
        """A draft of which `length` positions are known had `accepted` accepted; the verdict once there is one."""
        self.seen += 1
        self.accepted += accepted
        self.expected += float(self.rates[:length].cumprod().sum())
        if self.seen >= self.drafts:
            return "promoted" if self.accepted + SLACK * self.seen >= self.ratio * self.expected else "rolled_back"
        if self.seen >= max(8, EARLY * self.drafts) and self.accepted + SLACK * self.seen < EARLY_RATIO * self.expected:
            return "rolled_back"
        return None

    @property
    def reason(self) -> str:
        """What the verdict rests on."""
        n = max(self.seen, 1)
        return (
            f"{self.accepted / n:.2f} tokens accepted per draft against {self.expected / n:.2f} of the weights before, "
            f"over {self.seen} drafts"
        )
