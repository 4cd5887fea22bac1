"""Which arm to play: the interface of all policies, their registry, and the ones that learn nothing. `policies.make`
builds one by name.

An arm is (drafters, K): who may draft and the longest draft of a request. A policy keeps one learner per batch bucket
(octaves of the number of running requests), because what pays at batch 1 harms at batch 64.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from rollspec.errors import ConfigError

Vector = npt.NDArray[np.float64]


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

    `emitted[a]`: tokens that the step emits under arm a, summed over the batch; known exactly for the played arm and
    every shorter one, estimated where the played draft was accepted whole. `seconds[a]`: what the step costs under
    arm a by the cost model, drafting included. Shapes [arms]. `measured`: what the played arm's step took by the clock,
    drafting included; None for a step that computed prompts as well.
    """

    played: int
    batch: int
    emitted: Vector
    seconds: Vector
    measured: float | None = None

    @property
    def elapsed(self) -> float:
        """Seconds of the played arm: measured ones where there are any, else the cost model's."""
        return float(self.seconds[self.played]) if self.measured is None else self.measured

    def reward(self) -> float:
        """Tokens per second of the played arm: all that a bandit sees."""
        return float(self.emitted[self.played]) / self.elapsed


def bucket_of(batch: int) -> int:
    """Octave of the batch size: 1, 2, 3-4, 5-8, 9-16, ... are 0, 1, 2, 3, 4, ..."""
    return max(0, math.ceil(math.log2(batch))) if batch > 0 else 0


class Policy(ABC):
    """Chooses an arm per step. One thread; every random draw comes from its own generator."""

    name: ClassVar[str]
    full_information: ClassVar[bool] = False
    """Whether it learns from all of an `Outcome`, or from the played arm only."""
    measures: ClassVar[bool] = False
    """Whether it observes only steps whose seconds were measured."""

    def __init__(self, arms: Sequence[Arm], options: Mapping[str, Any] | None = None, seed: int = 0) -> None:
        if not arms:
            raise ConfigError("rollspec: tuning.arms is empty; give at least one draft length, or leave it unset.")
        self.arms = tuple(arms)
        self.options = dict(options or {})
        self.rng = np.random.default_rng(seed)

    @abstractmethod
    def choose(self, bucket: int) -> int:
        """Index of the arm for the next step at this batch bucket."""

    @abstractmethod
    def observe(self, bucket: int, outcome: Outcome) -> None:
        """Learn from a finished step."""

    def prior(self, bucket: int, outcome: Outcome) -> None:  # noqa: B027 - bandits learn from what they play only
        """What other buckets let expect of one that has seen nothing yet."""

    def changed(self) -> None:  # noqa: B027 - most policies have nothing to do
        """The policy's or a drafter's weights moved: what was learned is older than it looks."""

    def state(self) -> dict[str, Any]:
        """Its state, in JSON types."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - see `state`
        """Inverse of `state`. Raises ValueError if it belongs to other arms."""


REGISTRY: dict[str, type[Policy]] = {}
P = TypeVar("P", bound=type[Policy])


def register(name: str) -> Callable[[P], P]:
    """Class decorator: makes a policy selectable as `tuning.policy: <name>`."""

    def add(cls: P) -> P:
        cls.name = name
        REGISTRY[name] = cls
        return cls

    return add


@register("static")
class Static(Policy):
    """One arm for everything: the longest of those given (`tuning.arms: [K]`), with all drafters."""

    def choose(self, bucket: int) -> int:  # noqa: D102
        return max(range(len(self.arms)), key=lambda a: (self.arms[a].k, len(self.arms[a].drafters)))

    def observe(self, bucket: int, outcome: Outcome) -> None:  # noqa: D102
        return


@register("random")
class Random(Policy):
    """Any arm at any step, evenly: for audits and tests, which want every switch to happen."""

    def choose(self, bucket: int) -> int:  # noqa: D102
        return int(self.rng.integers(len(self.arms)))

    def observe(self, bucket: int, outcome: Outcome) -> None:  # noqa: D102
        return


@register("table")
class Table(Policy):
    """A draft length per batch size, fixed beforehand: ReSpec's profile (arXiv:2510.26475), vLLM's
    `num_speculative_tokens_per_batch_size`, or the best arms of an earlier run replayed (`rollspec bench tuner` prints
    them).

    Option `table`: {batch size up to which it holds: K}; larger batches take the last entry.
    """

    def __init__(self, arms: Sequence[Arm], options: Mapping[str, Any] | None = None, seed: int = 0) -> None:
        super().__init__(arms, options, seed)
        try:
            rows = sorted((int(b), int(k)) for b, k in dict(self.options["table"]).items())
        except (KeyError, TypeError, ValueError) as e:
            raise ConfigError(
                "rollspec: tuning.policy 'table' needs tuning.options.table, a mapping of batch sizes to draft "
                "lengths such as {4: 8, 16: 4, 64: 0}."
            ) from e
        if not rows:
            raise ConfigError("rollspec: tuning.options.table is empty; give at least one batch size.")
        ks = {arm.k: a for a, arm in enumerate(self.arms)}
        if missing := sorted({k for _, k in rows} - set(ks)):
            raise ConfigError(
                f"rollspec: tuning.options.table asks for K = {missing[0]}, which is not among tuning.arms "
                f"{sorted(ks)}; add it there."
            )
        self._rows = [(bucket_of(b), ks[k]) for b, k in rows]

    def choose(self, bucket: int) -> int:  # noqa: D102
        return next((a for b, a in self._rows if bucket % 16 <= b), self._rows[-1][1])

    def observe(self, bucket: int, outcome: Outcome) -> None:  # noqa: D102
        return
