"""Engines that take turns, so that what is compared is close in time, and that are started anew for every pair."""

from __future__ import annotations

import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.engines import Arm, Engine, Work


class TakesTurns(Protocol):
    """An engine, as far as `alternate` needs one."""

    arm: Arm

    def run(self, work: Work) -> dict[str, Any]:
        """Do `work`."""

    def suspend(self) -> None:
        """Halt it."""

    def resume(self) -> None:
        """Resume it."""


def alternate(
    engines: Sequence[TakesTurns], works: Mapping[int, Work], rounds: int, pause: float = 0.0
) -> dict[str, dict[int, list[float]]]:
    """Seconds of each work by arm and the work's key: engines take turns, first one way round and then the other; those
    that wait are suspended. Two rounds come before that are not counted.

    Args:
        pause: seconds before each turn in which the engine is there and has nothing to do.
    """
    seconds: dict[str, dict[int, list[float]]] = {e.arm.name: {key: [] for key in works} for e in engines}
    for engine in engines:
        engine.suspend()
    try:
        for r in range(-2, rounds):
            for key, work in works.items():
                for engine in engines if r % 2 == 0 else reversed(engines):
                    engine.resume()
                    time.sleep(pause)
                    took = engine.run(work)["seconds"]
                    engine.suspend()
                    if r >= 0:
                        seconds[engine.arm.name][key].append(took)
    finally:
        for engine in engines:
            engine.resume()
    return seconds


def anew(
    starts: int, arms: Sequence[Arm], model: str, max_len: int,
    measure: Callable[[list[Engine]], dict[str, dict[int, list[float]]]], folder: Path | None = None,
) -> dict[str, dict[int, list[float]]]:  # fmt: skip
    """What `measure` says of engines of these arms, by arm and work, the median of each start: two engines of one arm
    differ by several percent for as long as they live, so that only those of another start are another pair. Every
    other time they are started the other way round.

    Args:
        folder: where trainers keep what they learned; it is removed before each start.
    """
    found: dict[str, dict[int, list[float]]] = {}
    for n in range(starts):
        print(f"start {n + 1}/{starts}", file=sys.stderr, flush=True)
        engines: dict[str, Engine] = {}
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        try:
            for arm in arms if n % 2 == 0 else reversed(arms):
                engines[arm.name] = Engine(arm, model, max_len)
            for name, by_work in measure([engines[arm.name] for arm in arms]).items():
                for key, seconds in by_work.items():
                    found.setdefault(name, {}).setdefault(key, []).append(statistics.median(seconds))
        finally:
            for engine in engines.values():
                engine.close()
    return found


def idle_cores(engines: list[Engine], seconds: float = 2.0) -> float:
    """Cores that engines without work keep busy; anything but about 0 would spoil the comparison."""
    before = sum(e.cpu_seconds() for e in engines)
    time.sleep(seconds)
    return (sum(e.cpu_seconds() for e in engines) - before) / seconds
