"""The weights that run in one engine, those before them and those being staged, and the steps between them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from rollspec.head.draft_head import DraftHead
from rollspec.head.swap.payload import LoadedVersion, check, distance, read
from rollspec.log_once import LogOnce

LARGE = 0.02
"""Relative change of the weights from which on the KV that the old ones wrote is computed anew."""


@dataclass(frozen=True, slots=True)
class Staged:
    """Weights that the second copy of the drafter holds."""

    version: LoadedVersion
    change: float  # |new - old| / |old| over all weights
    seconds: float
    marks: list[float]  # fingerprint


class Deployment:
    """The drafter's weights in one worker, by version. `weights`: as of `Swapper`."""

    def __init__(self, head: DraftHead, weights: Any) -> None:
        self.head = head
        self.weights = weights
        self.running = LoadedVersion(0, {}, since=0)
        self.pauses: list[float] = []  # seconds that steps waited for an exchange, since the last drain
        self.resent = 0  # times that lost weights were put back
        self._log_once = LogOnce()
        self._before: tuple[LoadedVersion, dict[str, list[float]]] | None = None  # and what was known of its acceptance
        self._loading: threading.Thread | None = None  # something into the second copy

    def stage(self, payload: Mapping[str, Any]) -> Staged:
        """Load what a payload names into the second copy. Whatever it raises, nothing that runs was touched."""
        begin = time.perf_counter()
        original = self.weights.original()
        given = read(payload, self.running.number, self.head.base, original)
        tensors = self.weights.strip(given.tensors)
        check(tensors, original)
        change = distance(tensors, self._tensors(self.running))
        marks = self.weights.load(tensors)
        return Staged(replace(given, tensors=tensors), change, time.perf_counter() - begin, marks)

    def swap_in(self, staged: Staged) -> int:
        """Have the staged weights run; returns the positions whose KV is computed anew."""
        version, policy = staged.version, self.head.engine.version
        self._before = (self.running, self.head.acceptance.state())
        self.weights.exchange(staged.marks)
        again = self.head.rewind() if staged.change >= LARGE else 0
        # Versions of another job may count policies otherwise: none is of the future.
        self.running = replace(version, since=policy if version.since is None else min(version.since, policy))
        self.head.engine.swapped(version.number)
        return again

    def keep_before(self) -> None:
        """Load what ran before into the second copy, which is free now: rolling back is one exchange as well."""
        assert self._before is not None
        self.load_later(self.weights.load, self._tensors(self._before[0]))

    def promote(self) -> None:
        """What ran before is not needed any more."""
        self._before = None

    def roll_back(self) -> None:
        """What ran before runs again."""
        assert self._before is not None
        (before, acceptance), self._before = self._before, None
        begin = time.perf_counter()
        self.wait()
        self.weights.exchange()
        self.pauses.append(time.perf_counter() - begin)
        self.head.rewind()
        self.running = before
        self.head.engine.swapped(before.number, acceptance)

    def put_back(self, staged: Staged | None) -> None:
        """Write the running weights again; `staged`: what the second copy must hold afterwards."""
        self.resent += 1
        self._log_once("resent", "rollspec: the drafter's weights were lost or overwritten; they are put back.")
        self.weights.build()
        self.wait()
        self.weights.load(self._tensors(self.running))
        self.weights.exchange(self.weights.marks)
        self.head.rewind()
        if self._before is not None:
            self.weights.load(self._tensors(self._before[0]))
        elif staged is not None:
            self.weights.load(staged.version.tensors)

    def load_later(self, load: Callable[[Any], object], what: Any) -> None:
        """`load(what)` on a thread; `wait` for it."""
        self._loading = threading.Thread(target=load, args=(what,), name="rollspec-stage", daemon=True)
        self._loading.start()

    def wait(self) -> None:
        """Until what is being loaded into the second copy is there."""
        if self._loading is not None:
            self._loading.join()

    def _tensors(self, version: LoadedVersion) -> dict[str, torch.Tensor]:
        return version.tensors or self.weights.original()
