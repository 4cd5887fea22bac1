"""Shared fixtures of the unit tests."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target of a few thousand parameters on disk."""
    from drafter_target import target

    return target(tmp_path_factory.mktemp("drafter"))


@pytest.fixture
def steady_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proposers read 20 us from one reading of the clock to the next, however busy the machine: what they try depends
    on what it costs.
    """
    from rollspec.proposal import hybrid, proposer

    ticks = itertools.count()
    for module in (hybrid, proposer):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(ticks) * 2e-5))
