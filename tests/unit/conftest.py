"""Shared fixtures of the unit tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target of a few thousand parameters on disk."""
    from drafter_target import target

    return target(tmp_path_factory.mktemp("drafter"))


@pytest.fixture
def steady_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters read 20 us from one reading of the clock to the next, however busy the machine: what they try depends
    on what it costs.
    """
    from rollspec.drafting import counters

    ticks = itertools.count()
    monkeypatch.setattr(counters, "time", SimpleNamespace(perf_counter=lambda: next(ticks) * 2e-5))


@pytest.fixture
def ends() -> Iterator[Any]:
    """Both ends of the wire, closed after the test."""
    from wire_ends import Ends

    made = Ends()
    yield made
    for end in reversed(made.open):
        end.close()
