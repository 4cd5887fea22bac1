"""Shared fixtures of the unit tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target of a few thousand parameters on disk."""
    from drafter_target import target

    return target(tmp_path_factory.mktemp("drafter"))
