"""Fixtures of the kernels' tests."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture(params=range(6))
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    return np.random.default_rng(request.param)
