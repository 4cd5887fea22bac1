from __future__ import annotations

import itertools
import random
from itertools import accumulate
from operator import mul

import pytest

from rollspec.proposal.base import Draft
from rollspec.proposal.budget import allocate, floor
from rollspec.proposal.confidence import Confidence
from rollspec.tuning.cost import CostModel


def goodput(chains: list[list[float]], lengths: tuple[int, ...] | list[int], cost: CostModel) -> float:
    emitted = len(chains) + sum(sum(c[:n]) for c, n in zip(chains, lengths, strict=True))
    return emitted / cost.seconds(len(chains) + sum(lengths))


def test_allocation_is_the_optimum_found_by_brute_force() -> None:
    rng = random.Random(0)
    for _ in range(200):
        cost = CostModel()
        cost.c0, cost.c1 = rng.uniform(0, 0.02), rng.uniform(1e-5, 0.01)
        chains = []
        for _ in range(rng.randrange(1, 5)):
            p, chain = 1.0, []
            for _ in range(rng.randrange(0, 4)):
                p *= rng.choice([rng.random(), 1.0, 0.5])
                chain.append(p)
            chains.append(chain)
        lengths = allocate(chains, len(chains), cost)
        best = max(goodput(chains, c, cost) for c in itertools.product(*(range(len(chain) + 1) for chain in chains)))
        assert goodput(chains, lengths, cost) == pytest.approx(best, rel=1e-9)


def test_nothing_proposed() -> None:
    assert allocate([], 0, CostModel()) == []
    assert allocate([[], []], 2, CostModel()) == [0, 0]


def test_free_verification_takes_everything_and_dear_verification_nothing() -> None:
    cost = CostModel()
    cost.c1 = 0.0
    assert allocate([[0.9, 0.1], [0.3]], 2, cost) == [2, 1]
    cost.c0, cost.c1 = 0.0, 1.0
    assert allocate([[0.9, 0.1], [0.3]], 2, cost) == [0, 0]


def test_cost_model_recovers_a_line_in_noise() -> None:
    rng = random.Random(1)
    cost = CostModel()
    for _ in range(2000):
        n = int(2 ** rng.uniform(0, 8))
        noise = rng.lognormvariate(0, 0.1) * (20 if rng.random() < 0.02 else 1)
        cost.observe(n, (0.009 + 0.0003 * n) * noise)
    for n in (1, 16, 64, 200):
        assert cost.seconds(n) == pytest.approx(0.009 + 0.0003 * n, rel=0.2)


def test_cost_model_ignores_clocks_that_jump() -> None:
    cost = CostModel()
    for seconds in (-1.0, 0.0, 1e9, float("nan")):
        for _ in range(40):
            cost.observe(4, seconds)
            cost.observe(64, seconds)
    assert not cost.fitted
    assert cost.seconds(10) > 0


def test_confidence_learns_the_hit_rate_of_a_cell() -> None:
    rng = random.Random(0)
    confidence = Confidence()
    draft = Draft([5], [1.0], "group", 3)
    for _ in range(3000):
        _, cells = confidence.cumulative(draft, 0.0)
        confidence.observe("group", cells, draft.token_ids, [5 if rng.random() < 0.3 else 6])
    (p,), _ = confidence.cumulative(draft, 0.0)
    assert p == pytest.approx(0.3, abs=0.06)


def test_confidence_cuts_at_the_floor_and_never_rises() -> None:
    probs = [0.9, 0.5, 0.25, 0.1, 0.1]
    out, cells = Confidence().cumulative(Draft([1, 2, 3, 4, 5], probs, "group", 1), 0.15)
    assert out == sorted(out, reverse=True)
    assert len(out) == len(cells) < 5
    assert out[-1] < 0.15 <= out[-2], "the first one below goes on being scored"


def test_no_token_below_the_floor_is_ever_worth_verifying() -> None:
    rng = random.Random(2)
    cost = CostModel()
    for _ in range(300):
        cost.c1 = rng.choice([0.0, 1e-5, 1e-4, 1e-3])
        chains = [
            list(accumulate((rng.random() ** rng.choice([0.1, 1.0]) for _ in range(rng.randrange(6))), mul))
            for _ in range(rng.randrange(1, 40))
        ]
        low = floor(len(chains), cost)
        kept = allocate(chains, len(chains), cost)
        assert all(p >= low for chain, n in zip(chains, kept, strict=True) for p in chain[:n])
