"""The collapse alarm: a drafter whose acceptance stays below break-even is switched off until it would pay again.

Verifying v tokens at batch B takes T(B + v) - T(B) longer, in which the engine would have emitted that times B/T(B)
tokens without drafts: so many must be accepted to break even. What collapses at 64 may still pay in the tail, so each
batch bucket is judged apart. While a drafter is off, its drafts for a few requests are scored unverified, which costs
host time only.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from rollspec.log_once import LogOnce

logger = logging.getLogger("rollspec")

PATIENCE = 50
"""Verify steps (and, to come back, probes) that a verdict rests on, so that a few unlucky ones switch nothing off."""

BELOW = 0.9
"""A drafter is off when it reaches less than this of break-even; closer to it the strategy decides, with no alarm."""

RECOVER = 1.1  # a drafter comes back when its probes reach break-even by this factor, so that it does not flap


@dataclass(slots=True)
class _Watch:
    """One drafter at one batch bucket; discounted sums of tokens."""

    accepted: float = 0.0
    needed: float = 0.0
    steps: float = 0.0
    off: bool = False


@dataclass(slots=True)
class Guard:
    """Switches (drafter, batch bucket) off and on. `patience`: steps that must speak against it, or for it."""

    patience: int = PATIENCE
    alarms: int = 0
    recoveries: int = 0
    _watches: dict[tuple[str, int], _Watch] = field(default_factory=dict)
    _log_once: LogOnce = field(default_factory=LogOnce)

    def allows(self, drafter: str, bucket: int) -> bool:
        """Whether the drafter may draft at this batch bucket."""
        w = self._watches.get((drafter, bucket))
        return w is None or not w.off

    @property
    def off(self) -> list[str]:
        """What is switched off now, as `drafter@batch bucket`."""
        return sorted(f"{d}@{1 << (b % 16)}" for (d, b), w in self._watches.items() if w.off)

    def forget(self, drafter: str) -> None:
        """The drafter is another now (its weights were replaced): it is on, and watched from the start."""
        self._watches = {k: w for k, w in self._watches.items() if k[0] != drafter}

    def observe(self, drafter: str, bucket: int, accepted: float, needed: float) -> None:
        """A verify step (or a probe, while it is off) accepted `accepted` tokens where `needed` would break even."""
        if needed <= 0.0:
            return
        w = self._watches.setdefault((drafter, bucket), _Watch())
        keep = 1.0 - 1.0 / self.patience
        w.accepted = keep * w.accepted + accepted
        w.needed = keep * w.needed + needed
        w.steps += 1.0
        if w.steps < self.patience:
            return
        if not w.off and w.accepted < BELOW * w.needed:
            w.off, w.steps = True, 0.0
            self.alarms += 1
            self._log_once(  # per drafter: later alarms are counted in rollspec/guard/alarms
                drafter,
                "rollspec: the drafter %r is off at a batch of about %d: over the last %d verify steps %.2f of the "
                "tokens that break even were accepted. Probes will bring it back when it pays.",
                drafter,
                1 << (bucket % 16),
                self.patience,
                w.accepted / w.needed,
            )
        elif w.off and w.accepted > RECOVER * w.needed:
            w.off, w.steps = False, 0.0
            self.recoveries += 1
            logger.info("rollspec: the drafter %r pays again at a batch of %d; it is on.", drafter, 1 << (bucket % 16))
