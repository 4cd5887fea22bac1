from __future__ import annotations

import pytest

from drafter_online.worth import COST, PATIENCE, Worth

SAMPLES = [range(500)] * 4  # 2,000 tokens


def learned(*lengths: float) -> Worth:
    worth = Worth()
    for length in lengths:
        for _ in range(60):  # enough for the smoothed value to be there
            worth.observe(length)
    return worth


def test_a_version_is_published_when_its_gain_is_more_than_it_costs() -> None:
    worth = learned(1.5, 1.8)
    assert worth.saves(2000) == pytest.approx(2000 * (1 - 1.5 / 1.8), rel=0.01)
    assert worth.pays(SAMPLES, 100, 100) and not worth.pays(SAMPLES, 99, 100)
    assert not worth.pays([range(int(COST))], 100, 100), "too few tokens to come"
    worth.published()
    assert not worth.pays(SAMPLES, 100, 100), "the engine has it"


def test_what_is_learned_after_a_shift_pays_although_it_was_better_before() -> None:
    worth = learned(1.5, 2.5)
    worth.published()
    assert not worth.pays(SAMPLES, 100, 100)
    for length in (1.2, 1.4):  # other traffic
        for _ in range(60):
            worth.observe(length)
    assert worth.pays(SAMPLES, 100, 100)


def test_without_a_gain_a_version_comes_late_and_not_never() -> None:
    worth = learned(2.0, 1.9)
    assert not worth.pays(SAMPLES, 100 * PATIENCE - 1, 100) and worth.pays(SAMPLES, 100 * PATIENCE, 100)
    assert not Worth().pays(SAMPLES, 100, 100)
