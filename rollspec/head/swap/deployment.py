"""The weights that run in one engine, those before them and those being staged, and the steps between them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from rollspec.head.swap.owner import SwapOwner, Weights
from rollspec.head.swap.payload import Given, SwapRefusedError, check, distance, number_of, read, unprepared
from rollspec.log_once import LogOnce

LARGE = 0.02
"""Relative change of the weights from which on the KV that the old ones wrote is computed anew."""


@dataclass(frozen=True, slots=True)
class Running:
    """The weights that the engine drafts with."""

    version: int = 0
    since: int = 0  # newest policy version that they were trained on, or under which they came
    tensors: dict[str, torch.Tensor] | None = None  # by checkpoint name, on the CPU; None: as the engine was started
    store: Path | None = None  # of versions, that they are from


@dataclass(frozen=True, slots=True)
class Staged:
    """Weights that the second copy of the drafter holds."""

    given: Given
    change: float  # |new - old| / |old| over all weights
    seconds: float
    marks: list[float]  # fingerprint


@dataclass(slots=True, eq=False)
class Swap:
    """A version that was asked for; `payload`: see `Swapper.request`. `offered`: by another thread, not by hand.

        offered ──▶ staging ──▶ staged ──▶ canary ──▶ promoted, or rolled back
           └─▶ deferred ▲         └── without a canary ──▶ promoted

    Until it runs it can be refused, or a newer one takes its place.
    """

    payload: Mapping[str, Any]
    offered: bool = False
    state: Literal["offered", "deferred", "staging", "staged", "canary"] = "offered"  # deferred: the engine sleeps
    replaces: bool = False  # it replaced a staged one, and cannot be replaced itself
    wait: bool = field(init=False)  # the caller waits for the swap
    canary: bool = field(init=False)  # it is to be judged before it is promoted
    version: int | None = field(init=False)  # None: weights without a number
    thread: threading.Thread | None = None  # that stages it
    staged: Staged | None = None
    error: SwapRefusedError | None = None  # why it could not be staged, on this rank

    def __post_init__(self) -> None:
        self.wait, self.canary = bool(self.payload.get("wait")), bool(self.payload.get("canary", True))
        self.version = number_of(self.payload)

    @property
    def preparing(self) -> bool:
        """Whether it is being staged, or waits staged for a step."""
        return self.state in ("staging", "staged")

    def stage(self, stage: Callable[[Mapping[str, Any]], Staged]) -> None:
        """Stage, or remember why not. Never raises."""
        if self.error is not None:
            return
        try:
            self.staged = stage(self.payload)
        except Exception as e:
            self.error = e if isinstance(e, SwapRefusedError) else unprepared(e)

    def notice(self) -> bool:
        """Whether staging has ended, well or not; on the engine's thread, which takes the transition."""
        done = self.thread is None or not self.thread.is_alive()
        if self.state == "staging" and done and self.staged is not None:
            self.state = "staged"
        return done


class Deployment:
    """The drafter's weights in one worker, by version."""

    def __init__(self, owner: SwapOwner, weights: Weights) -> None:
        self.owner = owner
        self.weights = weights
        self.running = Running()
        self.pauses: list[float] = []  # seconds that steps waited for an exchange, since the last drain
        self.resent = 0  # times that lost weights were put back
        self._log_once = LogOnce()
        self._before: tuple[Running, dict[str, list[float]]] | None = None  # and what was known of its acceptance

    def stage(self, payload: Mapping[str, Any]) -> Staged:
        """Load what a payload names into the second copy. Whatever it raises, nothing that runs was touched."""
        begin = time.perf_counter()
        original = self.weights.original()
        given = read(payload, self.running.version, self.owner, original)
        tensors = self.weights.strip(given.tensors)
        check(tensors, original)
        change = distance(tensors, self._tensors(self.running))
        marks = self.weights.load(tensors)
        return Staged(replace(given, tensors=tensors), change, time.perf_counter() - begin, marks)

    def swap_in(self, staged: Staged) -> int:
        """Have the staged weights run; returns the positions whose KV is computed anew."""
        given, policy = staged.given, self.owner.policy_version
        self._before = (self.running, self.owner.acceptance.state())
        self.weights.exchange(staged.marks)
        again = self.owner.rewind() if staged.change >= LARGE else 0
        # Versions of another job may count policies otherwise: none is of the future.
        since = policy if given.target_version is None else min(given.target_version, policy)
        self.running = Running(given.version, since, given.tensors, given.store)
        self.owner.swapped(given.version)
        return again

    def keep_before(self) -> None:
        """Load what ran before into the second copy, which is free now: rolling back is one exchange as well."""
        assert self._before is not None
        self.weights.load_later(self._tensors(self._before[0]))

    def promote(self) -> None:
        """What ran before is not needed any more."""
        self._before = None

    def roll_back(self) -> None:
        """What ran before runs again."""
        assert self._before is not None
        (before, acceptance), self._before = self._before, None
        begin = time.perf_counter()
        self.weights.wait()
        self.weights.exchange()
        self.pauses.append(time.perf_counter() - begin)
        self.owner.rewind()
        self.running = before
        self.owner.swapped(before.version, acceptance)

    def put_back(self, staged: Staged | None) -> None:
        """Write the running weights again; `staged`: what the second copy must hold afterwards."""
        self.resent += 1
        self._log_once("resent", "rollspec: the drafter's weights were lost or overwritten; they are put back.")
        self.weights.build()
        self.weights.wait()
        self.weights.load(self._tensors(self.running))
        self.weights.exchange(self.weights.marks)
        self.owner.rewind()
        if self._before is not None:
            self.weights.load(self._tensors(self._before[0]))
        elif staged is not None:
            self.weights.load(staged.given.tensors)

    def _tensors(self, running: Running) -> dict[str, torch.Tensor]:
        return self.weights.original() if running.tensors is None else running.tensors
