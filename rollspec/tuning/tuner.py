"""Decides, once per step and in one place, how much is drafted; learns from every step about every arm.

The engine's output rank calls `plan` before it drafts and `observe` with the outcome; other ranks decide nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from rollspec.config import TuningConfig
from rollspec.tuning.cost import CostModel
from rollspec.tuning.guard import Guard
from rollspec.tuning.regret import Ledger
from rollspec.tuning.strategies import make
from rollspec.tuning.strategy import Arm, Outcome, Vector, bucket_of, restored

MODEL_DRAFTERS = ("eagle3", "draft_model", "mtp")  # drafters that cost forward passes; at most one of them drafts
CONTEXT_BUCKET = 4096  # mean context below which all steps share a bucket; each factor of four above it is another

WATCHED = 8
"""One request in this many is drafted for, unverified, while nothing is verified: what keeps the arms comparable."""

REST_AFTER, REST_EVERY = 64, 8
"""After so many steps in which the strategy wanted none, nothing is looked up at all but in every so many-th step."""

PRICE_EVERY, PRICE_FIRST, PRICE_STEPS = 256, 16, 4
"""After so many drafted steps of a batch bucket (the first time after fewer) come so many without drafts: what such a
step takes is known from nothing else where every step verifies, and every other arm is weighed against it."""

_SEED_STEPS = 8.0  # steps that a batch bucket's prior, taken from the other buckets, counts for
_SMOOTH = 1.0 / 64.0
_HOST_FIXED = 16.0  # drafting for a step costs the host what so many requests do, and what its requests do
_HOST_FIRST = 4  # steps of which the shortest is believed, after the very first, which warms caches up


@dataclass(slots=True)
class Plan:
    """One step's decision."""

    bucket: int
    chosen: int  # the strategy's arm
    played: int  # what the guard lets through
    k: int  # longest draft of a request that is verified
    watch: int  # draft for every `watch`-th request only, and verify nothing; 0: draft for all
    drafters: tuple[str, ...] = ()  # who may draft: the arm's, less those that the guard holds back
    rest: bool = False  # not even watched
    steps: int = 1  # that what is seen of this one stands for
    ahead: int = 0  # further steps of this batch that will rest, whatever is seen of this one


@dataclass(slots=True)
class Rows:
    """What was proposed to the requests of a step, or a sample of them, and what the target emitted of it.

    `unknown`: (row, calibrated cumulative probabilities) of proposals that outlived what is known: all that the target
    emitted was proposed, and more was proposed.
    """

    proposed: list[int] = field(default_factory=list)  # tokens that each one's budget allowed, whatever the arm
    accepted: list[int] = field(default_factory=list)  # leading ones that were emitted
    unknown: list[tuple[int, list[float]]] = field(default_factory=list)

    def add(self, most: int, found: int, expected: Sequence[float]) -> None:
        """Add a request; `found`: as `Confidence.observe` gives it, negative where the next token is unknown."""
        if found < 0:
            found = ~found
            if found < most:
                self.unknown.append((len(self.proposed), list(expected)))
        self.proposed.append(most)
        self.accepted.append(found)


@dataclass(slots=True)
class View(Rows):
    """The same of the arms that run a draft head, from what it proposed or would have."""

    runs: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))  # [arms] that would run it
    served: list[bool] = field(default_factory=list)  # rows that it served
    seconds: Vector = field(default_factory=lambda: np.zeros(0))  # [arms] that its passes take


class Tuner:
    """Cost model, strategy, guard and ledger of one engine. One thread."""

    def __init__(self, config: TuningConfig, k_max: int, drafters: tuple[str, ...]) -> None:
        self.config = config
        self.arms = arms_of(config, k_max, drafters)
        self.ks = np.array([a.k for a in self.arms])
        self.none = next(i for i, a in enumerate(self.arms) if not a.k)
        self.with_model = np.array([any(d in MODEL_DRAFTERS for d in a.drafters) for a in self.arms])  # [arms]
        self.cost = CostModel()
        # "none" is known of always; it is played only if it was asked for.
        self._index = [i for i, a in enumerate(self.arms) if config.arms is None or a.k in config.arms] or [self.none]
        self.strategy = make(
            config.strategy, [self.arms[i] for i in self._index], config.options.model_dump(exclude_none=True)
        )
        self.k_most = max(self.arms[i].k for i in self._index)
        self.guard = Guard()
        self.ledger = Ledger(self.arms)
        self.plays = np.zeros(len(self.arms))  # steps per arm since the last drain
        # Drafting seconds per request, with the step's own part spread: while nothing is verified, else.
        self._host = np.zeros(2)
        self._hosted = [0, 0]  # steps that they were measured in
        # Per request and arm, smoothed: tokens emitted and verified. The prior of buckets not seen yet.
        self._emitted: Vector = np.ones(len(self.arms))
        self._verified: Vector = np.zeros(len(self.arms))
        self._seen = 0
        self._seeded: set[int] = set()
        self._quiet: dict[int, int] = {}  # steps in a row, by bucket, in which the strategy wanted none
        self._unpriced: dict[int, int] = {}  # steps, by bucket, since none was played

    def plan(self, batch: int, context_tokens: float) -> Plan:
        """The decision for the next step of `batch` requests with `context_tokens` in all."""
        bucket = _bucket(batch, context_tokens)
        if bucket not in self._seeded and self._seen:
            self._seeded.add(bucket)
            seconds = _SEED_STEPS * self._seconds(batch, self._verified, context_tokens)
            emitted = _SEED_STEPS * batch * self._emitted
            self.strategy.prior(bucket, Outcome(0, batch, emitted[self._index], seconds[self._index]))
        chosen = self._index[self.strategy.choose(bucket)]
        played = chosen
        drafters = self.arms[chosen].drafters
        if self.config.guard.enabled and drafters:
            drafters = tuple(d for d in drafters if self.guard.allows(d, bucket))
            left = Arm(drafters, self.arms[chosen].k) if drafters else self.arms[self.none]
            played = self.arms.index(left) if left in self.arms else chosen
        if self._prices(bucket, played):
            played, drafters = self.none, ()
        self.plays[played] += 1
        watch = 0
        if played == self.none and len(self.arms) > 1:
            watch = WATCHED if batch >= 2 * WATCHED else max(1, batch // 2)
        quiet = self._quiet[bucket] = self._quiet.get(bucket, 0) + 1 if watch and chosen == self.none else 0
        resting = quiet > REST_AFTER
        rest, steps = resting and quiet % REST_EVERY != 0, REST_EVERY if resting else 1
        ahead = REST_EVERY - 1 - quiet % REST_EVERY if rest else 0
        return Plan(bucket, chosen, played, self.arms[played].k, watch, drafters, rest, steps, ahead)

    def pace(self, batch: int, context_tokens: float) -> float:
        """Tokens per second that the best arm without a draft head gives: what time is worth to the head's passes."""
        seconds = self._seconds(batch, self._verified, context_tokens)
        return float((batch * self._emitted / seconds)[~self.with_model].max())

    def _prices(self, bucket: int, played: int) -> bool:
        """Whether this step goes without drafts for its price alone. A bandit measures what it plays; and what was
        asked for without none stays without.
        """
        if played == self.none or not self.strategy.full_information or self.none not in self._index:
            self._unpriced[bucket] = 0
            return False
        n = self._unpriced[bucket] = self._unpriced.get(bucket, PRICE_EVERY - PRICE_FIRST) + 1
        if n == PRICE_EVERY + PRICE_STEPS:
            self._unpriced[bucket] = 0
        return n > PRICE_EVERY

    def observe(
        self,
        plan: Plan,
        batch: int,
        context_tokens: float,
        rows: Rows,
        view: View | None = None,
        measured: float | None = None,
    ) -> None:
        """What became of the step that `plan` decided.

        `batch`: requests that went through it with a chance of a draft, of which `rows` and `view` have those whose
        proposal is known. `measured`: seconds that it took, drafting included, if it was timed by itself.
        """
        if not rows.proposed or batch <= 0:
            return
        emitted, verified = self._tokens(rows)
        if view is not None:
            more, longer = self._tokens(view)
            emitted, verified = np.where(view.runs, more, emitted), np.where(view.runs, longer, verified)
        seconds = self._seconds(batch, verified, context_tokens)
        if view is not None:
            seconds = seconds + view.seconds
        outcome = Outcome(plan.played, batch, batch * (1.0 + emitted), seconds, measured)
        weight = max(_SMOOTH, 1.0 / (self._seen + 1))
        self._emitted += weight * (1.0 + emitted - self._emitted)
        self._verified += weight * (verified - self._verified)
        self._seen += 1
        self._teach(plan, outcome)
        self.ledger.add(plan.bucket, outcome, context_tokens, self.cost, plan.steps)
        if self.config.guard.enabled and plan.chosen != self.none:
            self._watch(plan, batch, float(emitted[plan.chosen]), seconds, view)

    def _tokens(self, rows: Rows) -> tuple[Vector, Vector]:
        """Tokens emitted, beyond one, and verified per request under each arm. Shapes [arms]."""
        n = len(rows.proposed)
        cut = np.minimum(np.array(rows.proposed), self.ks[:, None])
        emitted = np.minimum(np.array(rows.accepted), cut).sum(1).astype(float)
        for i, expected in rows.unknown:
            self._fill(emitted, cut[:, i].tolist(), rows.accepted[i], expected)
        return emitted / n, cut.sum(1) / n

    def _watch(self, plan: Plan, batch: int, emitted: float, seconds: Vector, view: View | None) -> None:
        """Tell the guard, per drafter of the chosen arm, what was accepted and what would break even."""
        arm = self.arms[plan.chosen]
        rate = batch / float(seconds[self.none])
        needed = float(seconds[plan.chosen] - seconds[self.none])
        ran = view is not None and bool(view.runs[plan.chosen])
        if view is None or not ran or len(arm.drafters) == 1:
            for drafter in arm.drafters:  # without the head their proposals are one, and so is the verdict
                if ran or drafter not in MODEL_DRAFTERS:
                    self.guard.observe(drafter, plan.bucket, batch * emitted, needed * rate)
            return
        passes = float(view.seconds[plan.chosen])
        cut = np.minimum(np.array(view.proposed), arm.k)
        accepted = np.minimum(np.array(view.accepted), cut).astype(float)
        for i, expected in view.unknown:
            more = np.zeros(len(self.arms))
            self._fill(more, [int(cut[i])], view.accepted[i], expected)
            accepted[i] += more[0]
        mine = np.array(view.served, bool)
        for drafter in arm.drafters:
            rows = mine if drafter in MODEL_DRAFTERS else ~mine
            share = float(cut[rows].sum()) / max(float(cut.sum()), 1.0)
            cost = share * (needed - passes) + (passes if drafter in MODEL_DRAFTERS else 0.0)
            self.guard.observe(drafter, plan.bucket, batch * float(accepted[rows].sum()) / len(cut), cost * rate)

    def _teach(self, plan: Plan, outcome: Outcome) -> None:
        measured = outcome.measured
        if plan.played in self._index:
            at = self._index.index(plan.played)
        elif self.strategy.full_information:
            at, measured = 0, None  # it looks at no arm in particular
        else:
            return  # the guard played an arm that this bandit does not have
        if measured is None and self.strategy.measures:
            return
        emitted, seconds = outcome.emitted[self._index], outcome.seconds[self._index]
        if measured is not None and not self.cost.fitted and not self.strategy.full_information:
            seconds = seconds * (measured / seconds[at])  # modelled ones have no scale yet
        self.strategy.observe(plan.bucket, Outcome(at, outcome.batch, emitted, seconds, measured))

    def modelled(self, running: Sequence[tuple[int, int]]) -> dict[str, float]:
        """Seconds by setting for what was emitted since the last call; `running`: as `Ledger.close` takes them."""
        nothing = np.zeros(len(self.arms))
        return self.ledger.close(
            running, lambda batch, context: float(self._seconds(batch, nothing, context)[self.none])
        )

    def host(self, seconds: float, requests: int, verifying: bool) -> None:
        """Drafting for a step of `requests` took `seconds` on the host, which is part of what an arm costs."""
        if requests and seconds > 0.0:
            i = int(verifying)
            each, before = seconds / (requests + _HOST_FIXED), self._host[i]
            self._hosted[i] += 1
            if self._hosted[i] == 1:
                return  # what is paid once says nothing; and it would keep an arm from being played ever again
            if self._hosted[i] <= 1 + _HOST_FIRST:
                self._host[i] = min(each, before) if before else each
            else:
                self._host[i] += (min(each, 4.0 * before) - before) * _SMOOTH

    def changed(self) -> None:
        """The policy's or a drafter's weights moved."""
        self.strategy.changed()
        self._quiet.clear()
        self._seen = min(self._seen, 16)

    def _seconds(self, batch: int, verified: Vector, context_tokens: float) -> Vector:
        """Cost of a step under each arm that verifies `verified` tokens per request, drafting included."""
        tokens = batch * (1.0 + verified)
        curve = self.cost.curve(batch, math.ceil(float(tokens.max())) - batch + 1, context_tokens)
        at = tokens - batch
        low = at.astype(int)
        seconds: Vector = curve[low] + (at - low) * (curve[np.minimum(low + 1, len(curve) - 1)] - curve[low])
        host = np.where(self.ks > 0, self._host[1] or self._host[0], self._host[0])
        return seconds + (batch + _HOST_FIXED) * host

    def _fill(self, emitted: Vector, cut: Sequence[int], accepted: int, expected: Sequence[float]) -> None:
        """Add what the calibrated confidence expects beyond the last token that is known."""
        known = expected[accepted - 1] if accepted else 1.0
        if known <= 0.0:
            return
        sums = list(accumulate(expected, initial=0.0))
        for a, n in enumerate(cut):
            if n > accepted:
                emitted[a] += (sums[min(n, len(expected))] - sums[accepted]) / known

    # ---- kept with the job ------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Its state, in JSON types."""
        return {
            "strategy": self.config.strategy,
            "learners": self.strategy.state(),
            "cost": self.cost.state(),
            "host": self._host.tolist(),
            "arms": [a.name for a in self.arms],
            "emitted": self._emitted.tolist(),
            "verified": self._verified.tolist(),
            "seen": self._seen,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state`; what belongs to another strategy or other arms is left out.

        Raises:
            ValueError: the numbers cannot be used.
        """
        self.cost.restore(state["cost"])
        if state["arms"] != [a.name for a in self.arms]:
            return
        like = {"host": self._host, "emitted": self._emitted, "verified": self._verified}
        self._host, self._emitted, self._verified = restored({name: state[name] for name in like}, like).values()
        self._seen = min(int(state["seen"]), 64)
        self._hosted = [1 + _HOST_FIRST if h else 0 for h in self._host]
        if state["strategy"] == self.config.strategy:
            self.strategy.restore(state["learners"])


def arms_of(config: TuningConfig, k_max: int, drafters: tuple[str, ...]) -> tuple[Arm, ...]:
    """The arms of a configuration, shortest first; "none" is always among them, if only for comparison."""
    if not drafters:
        return (Arm((), 0),)
    # A lookup is free beside a draft head's passes, so there are arms without the passes, and none without it.
    free = tuple(d for d in drafters if d not in MODEL_DRAFTERS)
    sets = [free, drafters] if free and free != drafters else [drafters]
    arms = [Arm((), 0)]
    arms += [Arm(s, k) for k in config.lengths(k_max) if 0 < k <= k_max for s in sets]
    return tuple(arms)


def _bucket(batch: int, context_tokens: float) -> int:
    each = context_tokens / batch if batch else 0.0
    level = int(math.log(each / CONTEXT_BUCKET, 4)) + 1 if each >= CONTEXT_BUCKET else 0
    return bucket_of(batch) + 16 * level
