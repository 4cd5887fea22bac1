"""Shared fixtures of the unit tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from importlib import metadata
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


@pytest.fixture(scope="session")
def given_head(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random head of the tiny target on disk."""
    import torch
    from drafter_target import head

    from drafter_online import head as heads

    return heads.save(head(tiny_target), tmp_path_factory.mktemp("head"), torch.float32)


@pytest.fixture
def services(tiny_target: Path, given_head: Path, tmp_path: Path) -> Iterator[Any]:
    """Starts daemons, which are closed after the test."""
    from running_service import Services

    made = Services(tmp_path, tiny_target, given_head)
    yield made
    made.close()


@pytest.fixture
def swapper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A swapper of a small drafter that shares its target's embedding."""
    from swap_owner import make

    made = make(tmp_path, monkeypatch)
    yield made
    made.deployment.wait()


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    """Folder of a demo job: a run with rollspec and its baseline."""
    from report_samples import write_demo

    return write_demo(tmp_path / "demo")


@pytest.fixture
def tested_trl(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A tested TRL is there, whatever is; afterwards rollspec is off again."""
    from rollspec_trl import engines

    from rollspec.engine.vllm import plugin

    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "1.16.0" if name == "trl" else real(name))
    before = engines._config
    yield
    engines._config = before
    plugin.enable(None)
