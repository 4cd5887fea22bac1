"""Which arm to play: the interface of all strategies, their registry, and the ones that learn nothing.

An arm is (drafters, K): who may draft and the longest draft of a request. A strategy keeps one learner per batch bucket
(octaves of the number of running requests), because what pays at batch 1 harms at batch 64.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]
Learner = dict[str, Vector]  # what a batch bucket learned: named arrays


@dataclass(frozen=True, slots=True)
class Arm:
    """Who drafts, and how far. No drafters, or `k` 0: no speculation."""

    drafters: tuple[str, ...]
    k: int

    @property
    def name(self) -> str:
        """As metrics and reports show it: `none`, `suffix:8`, `suffix+eagle3:4`."""
        return f"{'+'.join(self.drafters)}:{self.k}" if self.k and self.drafters else "none"


@dataclass(slots=True)
class Outcome:
    """The outcome of one engine step under every arm.

    Tokens are known exactly for the played arm and every shorter one, estimated where its draft was accepted whole.
    """

    played: int
    batch: int
    emitted: Vector  # [arms] tokens, summed over the batch
    seconds: Vector  # [arms] by the cost model, drafting included
    measured: float | None = None  # of the played arm, by the clock; None for a step that computed prompts as well

    @property
    def elapsed(self) -> float:
        """Seconds of the played arm: measured ones where there are any, else the cost model's."""
        return float(self.seconds[self.played]) if self.measured is None else self.measured


def bucket_of(batch: int) -> int:
    """Octave of the batch size: 1, 2, 3-4, 5-8, 9-16, ... are 0, 1, 2, 3, 4, ..."""
    return max(0, math.ceil(math.log2(batch))) if batch > 0 else 0


def restored(row: Mapping[str, Any], like: Learner, ragged: bool = False) -> Learner:
    """Stored arrays with the names and shapes of `like`; `ragged`: of any length.

    Raises:
        ValueError: they have others, or hold numbers that are negative or not finite.
    """
    if row.keys() != like.keys():
        raise ValueError(f"{', '.join(row)} cannot be {', '.join(like)}")
    found = {name: np.array(row[name], float) for name in like}
    if not all(
        (x.ndim == 1 if ragged else x.shape == like[name].shape) and np.isfinite(x).all() and (x >= 0).all()
        for name, x in found.items()
    ):
        raise ValueError(f"{', '.join(like)} hold numbers that cannot be")
    return found


class Strategy(ABC):
    """Chooses an arm per step. One thread; every random draw comes from its own generator."""

    name: ClassVar[str]
    full_information: ClassVar[bool] = False  # whether it learns from all of an `Outcome`, or from the played arm only
    measures: ClassVar[bool] = False  # whether it observes only steps whose seconds were measured

    def __init__(self, arms: Sequence[Arm], options: Mapping[str, Any] | None = None, seed: int = 0) -> None:
        self.arms = tuple(arms)
        self.options = dict(options or {})
        self.rng = np.random.default_rng(seed)

    @abstractmethod
    def choose(self, bucket: int) -> int:
        """Index of the arm for the next step at this batch bucket."""

    def observe(self, bucket: int, outcome: Outcome) -> None:  # noqa: B027 - some learn nothing
        """Learn from a finished step."""

    def prior(self, bucket: int, outcome: Outcome) -> None:  # noqa: B027 - bandits learn from what they play only
        """What other buckets let expect of one that has seen nothing yet."""

    def changed(self) -> None:  # noqa: B027 - most strategies have nothing to do
        """The policy's or a drafter's weights moved: what was learned is older than it looks."""

    def state(self) -> dict[str, Any]:
        """Its state, in JSON types."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - see `state`
        """Inverse of `state`. Raises ValueError if it belongs to other arms."""


class Learning(Strategy):
    """A strategy that keeps named arrays per batch bucket, and saves them with the job."""

    ragged: ClassVar[bool] = False  # whether the arrays may have any length

    def __init__(self, arms: Sequence[Arm], options: Mapping[str, Any] | None = None, seed: int = 0) -> None:
        super().__init__(arms, options, seed)
        self._buckets: defaultdict[int, Learner] = defaultdict(self._new)

    @abstractmethod
    def _new(self) -> Learner:
        """A bucket that has seen nothing."""

    def state(self) -> dict[str, Any]:  # noqa: D102
        buckets = {str(k): {name: a.tolist() for name, a in b.items()} for k, b in self._buckets.items()}
        return {"arms": [a.name for a in self.arms], "buckets": buckets}

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: D102
        if state.get("arms") != [a.name for a in self.arms]:
            raise ValueError(f"it is about the arms {state.get('arms')}, not {[a.name for a in self.arms]}")
        found = {int(key): restored(row, self._new(), self.ragged) for key, row in state["buckets"].items()}
        self._buckets = defaultdict(self._new, found)


REGISTRY: dict[str, type[Strategy]] = {}
P = TypeVar("P", bound=type[Strategy])


def register(name: str) -> Callable[[P], P]:
    """Class decorator: makes a strategy selectable as `tuning.strategy: <name>`."""

    def add(cls: P) -> P:
        cls.name = name
        REGISTRY[name] = cls
        return cls

    return add


def by_batch(rows: Mapping[int, Any], bucket: int) -> Any:
    """What `rows`, {batch size up to which it holds: value}, has for a bucket; larger batches take the last one."""
    ordered = sorted(rows.items())
    return next((value for batch, value in ordered if bucket % 16 <= bucket_of(batch)), ordered[-1][1])


@register("static")
class Static(Strategy):
    """One arm for everything: the longest of those given (`tuning.arms: [K]`), with all drafters."""

    def choose(self, bucket: int) -> int:  # noqa: D102
        return max(range(len(self.arms)), key=lambda a: (self.arms[a].k, len(self.arms[a].drafters)))


@register("random")
class Random(Strategy):
    """Any arm at any step, evenly: for audits and tests, which want every switch to happen."""

    def choose(self, bucket: int) -> int:  # noqa: D102
        return int(self.rng.integers(len(self.arms)))


@register("table")
class Table(Strategy):
    """A draft length per batch size, fixed beforehand (option `table`): ReSpec's profile (arXiv:2510.26475), vLLM's
    `num_speculative_tokens_per_batch_size`, or the best arms of an earlier run (`rollspec bench tuner` prints them).
    """

    def choose(self, bucket: int) -> int:  # noqa: D102
        k = by_batch(self.options["table"], bucket)
        return next(a for a in reversed(range(len(self.arms))) if self.arms[a].k == k)
