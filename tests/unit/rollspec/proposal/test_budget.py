from __future__ import annotations

import itertools
import random
from itertools import accumulate
from operator import mul

import numpy as np
import numpy.typing as npt
import pytest

from rollspec.audit.statistics import g_test
from rollspec.proposal import lengths
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
        cost = CostModel(rng.uniform(0, 0.02), rng.uniform(1e-5, 0.01))
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


def test_of_tokens_that_are_worth_the_same_only_so_many_are_taken_and_a_likelier_one_behind_them_is() -> None:
    class Room(CostModel):
        """Five tokens are free, and more cost a hundred times as much."""

        def curve(self, tokens: int, most: int, context_tokens: float = 0.0) -> npt.NDArray[np.float64]:
            return np.where(tokens + np.arange(most + 1) <= 5, 0.01, 1.0)

    assert allocate([[0.5], [0.5], [0.9]], 3, Room()) == [1, 0, 1]
    assert allocate([[0.5, 0.5], [0.9, 0.5]], 2, Room()) == [2, 1]


def test_nothing_proposed() -> None:
    assert allocate([], 0, CostModel()) == []
    assert allocate([[], []], 2, CostModel()) == [0, 0]


def test_free_verification_takes_everything_and_dear_verification_nothing() -> None:
    cost = CostModel(0.01, 0.0)
    assert allocate([[0.9, 0.1], [0.3]], 2, cost) == [2, 1]
    cost = CostModel(0.0, 1.0)
    assert allocate([[0.9, 0.1], [0.3]], 2, cost) == [0, 0]


def test_confidence_learns_the_acceptance_of_a_cell() -> None:
    rng = random.Random(0)
    confidence = Confidence()
    draft = Draft([5], [1.0], "group", 3)
    for _ in range(3000):
        _, cells = confidence.cumulative(draft, 0.0)
        confidence.observe("group", cells, draft.token_ids, [5 if rng.random() < 0.3 else 6])
    (p,), _ = confidence.cumulative(draft, 0.0)
    assert p == pytest.approx(0.3, abs=0.06)


def test_predictions_follow_what_was_accepted_of_verified_drafts() -> None:
    """The table is right on the whole; of the drafts that are chosen for verification only half as much is accepted."""
    rng = random.Random(1)
    confidence = Confidence()
    draft = Draft([5], [1.0], "group", 3)
    predicted = accepted = 0.0
    for i in range(3000):
        (p,), cells = confidence.cumulative(draft, 0.0)
        chosen = i % 2 == 0
        same = rng.random() < (0.4 if chosen else 0.8)
        confidence.observe("group", cells, draft.token_ids, [5 if same else 6])
        if chosen:
            confidence.verified("group", p, int(same))
            if i > 500:
                predicted, accepted = predicted + p, accepted + same
    assert predicted == pytest.approx(accepted, rel=0.1)
    (low,), _ = confidence.cumulative(draft, 0.0)
    again = Confidence()
    again.restore(confidence.state())
    assert again.cumulative(draft, 0.0)[0][0] == pytest.approx(low, rel=1e-2)
    for _ in range(20_000):  # nothing is verified any more: what was seen is forgotten, and drafts get another chance
        _, cells = confidence.cumulative(draft, 0.0)
        confidence.observe("group", cells, draft.token_ids, [5 if rng.random() < 0.8 else 6])
    assert confidence.cumulative(draft, 0.0)[0][0] == pytest.approx(0.8, abs=0.06)


def test_confidence_cuts_at_the_floor_and_never_rises() -> None:
    probs = [0.9, 0.5, 0.25, 0.1, 0.1]
    out, cells = Confidence().cumulative(Draft([1, 2, 3, 4, 5], probs, "group", 1), 0.15)
    assert out == sorted(out, reverse=True)
    assert len(out) == len(cells) < 5
    assert out[-1] < 0.15 <= out[-2], "the first one below goes on being scored"


def test_no_token_below_the_floor_is_ever_worth_verifying() -> None:
    rng = random.Random(2)
    for _ in range(300):
        cost = CostModel(0.01, rng.choice([0.0, 1e-5, 1e-4, 1e-3]))
        chains = [
            list(accumulate((rng.random() ** rng.choice([0.1, 1.0]) for _ in range(rng.randrange(6))), mul))
            for _ in range(rng.randrange(1, 40))
        ]
        for margin in (0.0, 0.1):
            low = floor(len(chains), cost, margin=margin)
            kept = allocate(chains, len(chains), cost, margin=margin)
            assert all(p >= low for chain, n in zip(chains, kept, strict=True) for p in chain[:n])


def test_a_margin_keeps_what_hardly_pays_out_of_large_batches_alone() -> None:
    """Worth 1.05 times their price in a batch of 64, drafts would gain a hundredth at the most."""
    cost = CostModel(0.04, 0.002)
    p = 1.05 * floor(64, cost)
    assert sum(allocate([[p]] * 64, 64, cost)) == 64
    assert sum(allocate([[p]] * 64, 64, cost, margin=0.1)) == 0
    assert sum(allocate([[p]] * 4, 4, cost, margin=0.1)) == 4


def test_a_step_that_gains_too_little_verifies_nothing() -> None:
    cost = CostModel(0.04, 0.002)
    one, many = [[0.9]] + [[]] * 63, [[0.9]] * 64
    assert sum(allocate(one, 64, cost)) == 1 and sum(allocate(one, 64, cost, least=0.02)) == 0
    assert sum(allocate(many, 64, cost, least=0.02)) == 64
    assert sum(allocate([[0.9]], 1, cost, least=0.02)) == 1


def test_weighted_allocation_is_the_optimum_found_by_brute_force() -> None:
    rng = random.Random(4)
    for _ in range(150):
        cost = CostModel(rng.uniform(0.001, 0.02), rng.uniform(1e-5, 0.01))
        sizes = [rng.randrange(4) for _ in range(rng.randrange(1, 5))]
        chains = [list(accumulate((rng.random() for _ in range(n)), mul)) for n in sizes]
        weights = [rng.uniform(0.5, 2.0) for _ in chains]

        def value(lengths: tuple[int, ...] | list[int]) -> float:
            gained = sum(w * (1 + sum(c[:n])) for w, c, n in zip(weights, chains, lengths, strict=True))  # noqa: B023
            return gained / cost.seconds(len(chains) + sum(lengths))  # noqa: B023

        lengths = allocate(chains, len(chains), cost, weights=weights)
        every = itertools.product(*(range(len(chain) + 1) for chain in chains))
        assert value(lengths) == pytest.approx(max(value(c) for c in every), rel=1e-9)


def test_a_sample_of_the_batch_is_given_what_the_whole_would_be() -> None:
    cost = CostModel(0.01, 0.0003)
    chains = [[0.9, 0.8, 0.5], [0.7, 0.3], [0.2], []]
    whole = allocate(chains * 8, 32, cost)
    assert allocate(chains, 32, cost, copies=8.0) == whole[:4]


def test_a_curve_with_a_knee_is_used_up_to_the_knee() -> None:
    cost = CostModel()
    rng = random.Random(0)
    for _ in range(3000):
        n = rng.randrange(1, 120)
        cost.observe(n, 0.01 + 0.002 * max(0, n - 32), 0, 8)
    assert sum(allocate([[0.6] * 16] * 8, 8, cost)) == pytest.approx(24, abs=4)


def rejection_sampled(
    p: np.ndarray, q: np.ndarray, keep: np.ndarray | bool, rng: np.random.Generator, n: int
) -> np.ndarray:
    """Counts of the token that is emitted: drafts x ~ q where `keep[x]`, verified against p; else the target's own."""
    drawn = rng.choice(len(q), n, p=q)
    verified = np.broadcast_to(keep, len(q))[drawn]
    accepted = verified & (rng.random(n) * q[drawn] < p[drawn])
    residual = np.maximum(p - q, 0.0)
    out = np.where(accepted, drawn, rng.choice(len(p), n, p=residual / residual.sum()))
    out = np.where(verified, out, rng.choice(len(p), n, p=p))
    return np.bincount(out, minlength=len(p))


def test_dropping_a_sampled_draft_by_its_own_probability_biases_the_distribution_and_the_audit_sees_it() -> None:
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(12)), rng.dirichlet(np.ones(12))
    trap = rejection_sampled(p, q, q > np.median(q), rng, 40_000)
    assert g_test(trap, p)[2] < 1e-6
    # Decided from what was known before the token was drawn: all of them, or none.
    for keep in (True, False):
        assert g_test(rejection_sampled(p, q, keep, rng, 40_000), p)[2] > 1e-3
    # One-hot proposals are exact under any rule, q(x) included.
    for token in range(12):
        hot = np.eye(12)[token]
        assert g_test(rejection_sampled(p, hot, q > np.median(q), rng, 20_000), p)[2] > 1e-4


def test_expected_remaining_length() -> None:
    assert lengths.remaining(10, [5, 20, 40], 512) == 20.0
    assert lengths.remaining(50, [5, 20, 40], 512) == 50.0, "it outlived all: as much again"
    assert lengths.remaining(400, [5], 512) == 112.0
    assert lengths.remaining(512, [600], 512) == 0.0
    weights = lengths.weights([10.0, 10.0, 1000.0], 1.0)
    assert sum(weights) == pytest.approx(3.0) and weights[2] == pytest.approx(4 * weights[0])
    assert lengths.weights([0.0, 0.0], 1.0) == [1.0, 1.0]


def test_refill_tells_a_queue_from_a_draining_batch() -> None:
    queue, drain = lengths.Refill(), lengths.Refill()
    for _ in range(64):
        queue.began()
        drain.began()
    assert queue.rate == drain.rate == 0.0, "a first wave replaces no request"
    for _ in range(40):
        queue.ended()
        drain.ended()
        for _ in range(3):
            queue.step()
            drain.step()
        queue.began()
    assert queue.rate > 0.9 and drain.rate == 0.0
    for _ in range(40):
        queue.ended()
        for _ in range(40):
            queue.step()
    assert queue.rate < 0.1, "its queue is empty now"
