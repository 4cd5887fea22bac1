"""What runs in one engine, what ran before it, and the steps from one to the other and back."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from rollspec.engine.vllm.swap.owner import SwapOwner
from rollspec.engine.vllm.swap.payload import SwapRefusedError, check, distance, read, unprepared
from rollspec.engine.vllm.swap.swap import Running, Staged, Swap
from rollspec.engine.vllm.swap.weights import DraftWeights
from rollspec.log_once import LogOnce

LARGE = 0.02
"""Relative change of the weights from which on the KV that the old ones wrote is computed anew."""


class Deployment:
    """The drafter's weights in one worker, by version."""

    def __init__(self, owner: SwapOwner) -> None:
        self.owner = owner
        self.weights = DraftWeights(owner)
        self.running = Running()
        self.pauses: list[float] = []  # seconds that steps waited for an exchange, since the last drain
        self.resent = 0  # times that lost weights were put back
        self._once = LogOnce()
        self._before: tuple[Running, dict[str, list[float]]] | None = None  # and what was known of its acceptance

    def stage(self, swap: Swap) -> None:
        """Stage, or remember why not. Never raises: a fault while staging touches nothing that runs."""
        if swap.error is not None:
            return
        try:
            begin = time.perf_counter()
            original = self.weights.original()
            given = read(swap.payload, self.running.version, self.owner, original)
            tensors = self.weights.strip(given.tensors)
            check(tensors, original)
            change = distance(tensors, self._tensors(self.running))
            marks = self.weights.load(tensors)
            swap.staged = Staged(replace(given, tensors=tensors), change, time.perf_counter() - begin, marks)
        except SwapRefusedError as e:
            swap.error = e
        except Exception as e:
            swap.error = unprepared(e)

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
        self._once("resent", "rollspec: the drafter's weights were lost or overwritten; they are put back.")
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
