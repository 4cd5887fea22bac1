"""Leap+Verify (arXiv:2602.19580): offer the weights that training is heading for, and let a check decide.

    w~ = w + a (w - w')        w': the weights at the last publication, a: `DrafterTraining.leap`

Only the paper's abstract is known here. Of its predictors this is the linear one, over the interval of one publication;
the canary stands in the place of its held-out loss, and after a version that was rolled back the next one is published
as it was trained. Training itself continues from w, so a bad leap costs one version.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from drafter_online.versions import Versions


class Leap:
    """Extrapolates from publication to publication; one trainer's.

    Attributes:
        by: how far, in intervals between two publications; 0 publishes what was trained.
        last: the version that was published with a leap last.
    """

    def __init__(self, by: float) -> None:
        self.by = by
        self.last: int | None = None
        self._before: dict[str, Tensor] = {}  # w'

    def ahead(self, weights: Mapping[str, Tensor], versions: Versions) -> tuple[dict[str, Tensor], bool]:
        """The weights to publish, by name, and whether they are extrapolated: not at first, nor after a rollback."""
        if not self.by:
            return dict(weights), False
        before, self._before = self._before, {n: t.detach().clone() for n, t in weights.items()}
        bad = any(e.version == self.last and e.verdict != "promoted" for e in versions.events())
        if not before or (bad and self.last is not None):
            self.last = None
            return dict(weights), False
        return {n: self._of(t, before[n]) for n, t in weights.items()}, True

    def _of(self, new: Tensor, old: Tensor) -> Tensor:
        if not new.is_floating_point() or new.shape != old.shape:
            return new  # the tokens that a head drafts
        return (new.float() + self.by * (new.float() - old.float())).to(new.dtype)
