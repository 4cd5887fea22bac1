"""A run's speed against the possible ones, by its engine's cost model: the report's section on the tuner.

The engine's ledger (`rollspec/tuning/regret.py`) writes, per training step, the seconds that other settings would have
taken for the tokens of that step. Sums over the run give a speed-up for each, all against no drafts at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollspec.telemetry.runs import Run

MODELLED = "rollspec/tuner/modelled_seconds/"
ARM = "rollspec/tuner/arm/"
MOST_ARMS = 5
PLAYED, NONE, ORACLE, CLAIRVOYANT, PERFECT = "played", "none", "oracle", "clairvoyant", "perfect"
_BOUNDS = (PLAYED, ORACLE, CLAIRVOYANT, PERFECT)


ENOUGH_DRAFTED, PART = 500, 0.2
"""Drafted tokens after which predicted and accepted ones should agree, and by what share they may part."""


@dataclass(frozen=True)
class Calibration:
    """Of a run's `drafted` tokens, how many the drafters expected to be accepted, and how many were."""

    drafted: float
    predicted: float
    accepted: float

    @property
    def parts(self) -> bool:
        """Whether the two differ by more than chance and a moving policy explain."""
        least = PART * max(self.accepted, 1.0)
        return self.drafted >= ENOUGH_DRAFTED and abs(self.predicted - self.accepted) > least

    def sentence(self) -> str:
        """Both numbers, and what to do where they part."""
        text = (
            f"Of {self.drafted:,.0f} draft tokens {self.predicted:,.0f} were predicted to be accepted, and "
            f"{self.accepted:,.0f} were."
        )
        if not self.parts:
            return text
        return (
            f"{text} They part by more than {PART:.0%}, so draft lengths are chosen from wrong chances: see "
            "accept/predicted in docs/troubleshooting.md."
        )


def calibration(run: Run) -> Calibration | None:
    """Of a run; None where nothing was drafted, or its metrics do not say."""
    names = ("rollspec/accept/drafted", "rollspec/accept/predicted", "rollspec/accept/accepted")
    drafted = predicted = accepted = 0.0
    for d, p, a in zip(*map(run.series, names), strict=True):
        if d is not None and p is not None and a is not None:
            drafted, predicted, accepted = drafted + d, predicted + d * p, accepted + a
    return Calibration(drafted, predicted, accepted) if drafted else None


@dataclass(frozen=True)
class Limits:
    """Speed-ups over no drafts, of one run, all modelled so that they compare. Shares are of engine time.

    `oracle`: the best arm of each batch bucket, known in hindsight; `clairvoyant`: the best arm of each engine step,
    which no policy can reach; `perfect`: a drafter that is always right.
    """

    got: float
    best_fixed: float
    best_fixed_arm: str
    oracle: float
    clairvoyant: float
    perfect: float
    cost_error: float | None  # median relative error of predicted step times
    max_acceptance: float | None  # E[max p]: the most that one-hot drafts can have accepted per token
    tuner_share: float | None
    host_share: float | None

    @property
    def regret(self) -> float:
        """Modelled time over the oracle's, less 1."""
        return self.oracle / self.got - 1.0

    def sentence(self) -> str:
        """The limits in one sentence."""
        return (
            f"You got {self.got:.2f}×; the best fixed setting ({self.best_fixed_arm}) would have got "
            f"{self.best_fixed:.2f}×; the oracle {self.oracle:.2f}×; a perfect drafter on this machine "
            f"{self.perfect:.2f}×."
        )

    def sentences(self) -> list[str]:
        """What was possible, as the report says it."""
        sentences = [
            self.sentence(),
            "Against the oracle, the best arm of each batch size known in hindsight, it took "
            f"{100 * abs(self.regret):.1f} % {'more' if self.regret >= 0 else 'less'} time.",
        ]
        if self.max_acceptance is not None:
            sentences.append(
                f"A one-hot draft can have at most {100 * self.max_acceptance:.0f} % of its tokens accepted: E[max p]."
            )
        if self.host_share is not None and self.tuner_share is not None:
            sentences.append(
                f"Drafting took {100 * self.host_share:.1f} % of engine time, of which deciding how much took "
                f"{100 * self.tuner_share:.1f}."
            )
        error = "" if self.cost_error is None else f", whose median error is {100 * self.cost_error:.1f} % of a step"
        sentences.append(
            f"All of these are computed by the fitted cost of this engine's steps{error}, against no drafts in it. "
            "Where steps do not overlap (docs/how-it-works.md), an engine built without speculation has shorter ones: "
            "the measured ratio above is against that."
        )
        return sentences


def limits(run: Run) -> Limits | None:
    """The limits of a run; None where its metrics do not carry them."""
    seconds = {name.removeprefix(MODELLED): sum(run.known(name)) for name in run.names(MODELLED)}
    if not all(seconds.get(k) for k in (*_BOUNDS, NONE)):
        return None
    fixed = {k: t for k, t in seconds.items() if k not in _BOUNDS and t > 0}
    arm = min(fixed, key=lambda k: fixed[k])
    base = seconds[NONE]
    weights = run.series("rollspec/rollout/engine_seconds")
    return Limits(
        got=base / seconds[PLAYED],
        best_fixed=base / fixed[arm],
        best_fixed_arm=arm,
        oracle=base / seconds[ORACLE],
        clairvoyant=base / seconds[CLAIRVOYANT],
        perfect=base / seconds[PERFECT],
        cost_error=_weighted(run.series("rollspec/tuner/cost_error"), weights),
        max_acceptance=_weighted(run.series("rollspec/accept/max_acceptance"), weights),
        tuner_share=_weighted(run.series("rollspec/tuner/share"), weights),
        host_share=_weighted(run.series("rollspec/rollout/propose_share"), weights),
    )


def arm_shares(run: Run) -> list[tuple[str, list[float | None]]]:
    """Share of engine steps per arm and training step, the `MOST_ARMS` that were played most."""
    # A step that carries any arm carries all that were played in it.
    recorded = [any(name.startswith(ARM) for name in row) for row in run.rows]
    found = {
        name.removeprefix(ARM): [(v or 0.0) if t else None for v, t in zip(run.series(name), recorded, strict=True)]
        for name in run.names(ARM)
    }
    order = sorted(found, key=lambda a: -sum(v or 0.0 for v in found[a]))[:MOST_ARMS]
    return [(arm, found[arm]) for arm in found if arm in order]


def _weighted(values: Sequence[float | None], weights: Sequence[float | None]) -> float | None:
    pairs = [(v, w) for v, w in zip(values, weights, strict=True) if v is not None and w]
    total = sum(w for _, w in pairs)
    return sum(v * w for v, w in pairs) / total if total else None
