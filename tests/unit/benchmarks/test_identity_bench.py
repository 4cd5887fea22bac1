"""The benchmark of identity: where texts part, and by how much the winner led there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.identity import compare
from rollspec import RollspecConfig
from rollspec.audit.engine import AuditPlan
from rollspec.audit.evidence import Samples, samples_from
from rollspec.audit.noise import gumbel, keys_of

VOCAB = 20
PLAN = AuditPlan(prompts=((1, 2, 3), (4, 5)), seed=3, temperature=0.5)
PLACES = [0, 0, 1]
"""Prompts of the texts: two siblings and one of another prompt."""


def _target() -> Any:
    """Logits are twice the token's id, whatever came before."""
    return SimpleNamespace(vocab=VOCAB, temperature=0.5, gap=lambda prompt, response, a, b: 2.0 * (a - b))


def _samples(*texts: list[int]) -> Samples:
    return samples_from([list(t) for t in texts], PLACES)


def test_equal_texts() -> None:
    a = _samples([1, 2, 3], [4], [5, 6])
    found = compare(a, a, PLAN, _target())
    assert (found["texts"], found["tokens"], found["parted"], found["parted_per_token"]) == (3, 6, 0, 0.0)
    assert found["gap_median"] is None and found["gap_max"] is None and found["gaps"] == []


def test_texts_are_compared_up_to_where_they_part_and_scored_there() -> None:
    """By logits over the temperature and the noise of the first engine's seed, at the token's place in the sequence."""
    a = _samples([1, 2, 3, 4], [7, 8], [5, 6])
    b = _samples([1, 9, 9, 9], [7, 8], [5, 0])
    found = compare(a, b, PLAN, _target())
    keys = keys_of(a, PLAN.prompts, RollspecConfig.load({"mode": "coupled"}, env={}), PLAN.seed, 0)
    expected = []
    for s, position, x, y in ((0, 3 + 1, 2, 9), (2, 2 + 1, 6, 0)):
        noise = gumbel(keys[s : s + 1], np.array([position]), VOCAB)[0]
        expected.append(abs(2.0 * (x - y) / 0.5 + noise[x] - noise[y]))
    assert found["texts"] == 3 and found["tokens"] == 2 + 2 + 2 and found["parted"] == 2
    assert found["parted_per_token"] == pytest.approx(2 / 6)
    assert found["gaps"] == pytest.approx(sorted(expected))
    assert found["gap_max"] == max(found["gaps"]) and found["gap_median"] == pytest.approx(np.median(expected))


def test_one_that_goes_on_parts_nowhere_but_what_is_compared_ends() -> None:
    found = compare(_samples([1, 2], [3], [4]), _samples([1, 2, 5], [3], [4]), PLAN, _target())
    assert (found["tokens"], found["parted"]) == (4, 0)
