"""Shared fixtures of the unit tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollspec.proposal import suffix


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


@pytest.fixture(scope="module", params=["scan", "tree"])
def each_lookup(request: pytest.FixtureRequest) -> Iterator[None]:
    """Suffix drafts by scan, and by arctic-inference's trees where these are installed."""
    if request.param == "scan":
        yield
        return
    pytest.importorskip("arctic_inference")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffix, "_scan", suffix._tree)
        patch.setitem(suffix.BYTES_PER_TOKEN, "scan", suffix.BYTES_PER_TOKEN["tree"])
        yield
