"""The statistics of a canary."""

from __future__ import annotations

import numpy as np
import pytest

from drafter_online.canary import Canary


@pytest.mark.parametrize(
    ("accepted", "verdict"), [(3, "promoted"), (2, "promoted"), (1, "rolled_back"), (0, "rolled_back")]
)
def test_a_canary_compares_with_the_weights_before(accepted: int, verdict: str) -> None:
    c = Canary(7, np.array([0.9, 0.8, 0.7]), drafts=40, ratio=0.9)  # 0.9 + 0.72 + 0.504 = 2.12 per draft
    found = None
    while found is None:
        found = c.observe(accepted, 3)
    assert found == verdict
    assert c.seen == (10 if accepted == 0 else 40), "what is useless is rolled back early"
    assert "against 2.12" in c.reason


def test_a_canary_after_useless_weights_promotes() -> None:
    c = Canary(1, np.array([0.0, 0.6]), drafts=8, ratio=0.9)
    assert [c.observe(0, 2) for _ in range(8)][-1] == "promoted"
