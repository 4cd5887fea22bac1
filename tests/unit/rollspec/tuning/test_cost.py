"""The cost model against curves that are known: lines, knees, context, faults of the clock, another machine."""

from __future__ import annotations

import json
import random
import time

import numpy as np
import pytest

from rollspec.tuning.cost import CostModel


def learn(cost: CostModel, curve: object, steps: int = 2000, seed: int = 0, noise: float = 0.08) -> None:
    rng = random.Random(seed)
    for _ in range(steps):
        batch = rng.choice([1, 2, 5, 9, 20, 40, 64])
        n, context_tokens = batch + int(batch * rng.random() * 6), batch * rng.randrange(50, 4000)
        outlier = 15 if rng.random() < 0.01 else 1
        cost.observe(n, curve(n, context_tokens) * rng.lognormvariate(0, noise) * outlier, context_tokens, batch)  # type: ignore[operator]


def test_a_line_in_noise_is_recovered() -> None:
    cost = CostModel()
    learn(cost, lambda n, h: 0.009 + 0.0003 * n)
    for n in (1, 16, 64, 200, 400):
        assert cost.seconds(n, 100 * n) == pytest.approx(0.009 + 0.0003 * n, rel=0.1)
    assert cost.c0 == pytest.approx(0.009, rel=0.2) and cost.c1 == pytest.approx(0.0003, rel=0.2)
    assert cost.error is not None and cost.error < 0.1


def test_a_knee_is_followed_and_so_is_the_context() -> None:
    def curve(n: float, h: float) -> float:
        return 0.003 + 0.00005 * min(n, 32) + 0.0006 * max(0.0, n - 32) + 2e-8 * h

    cost = CostModel()
    learn(cost, curve, steps=4000)
    for n, h in ((1, 100), (8, 8000), (32, 3000), (64, 100_000), (128, 10_000), (300, 200_000)):
        assert cost.seconds(n, h) == pytest.approx(curve(n, h), rel=0.15), (n, h)
    assert cost.seconds(16) - cost.seconds(8) < 0.3 * (cost.seconds(136) - cost.seconds(128))


def test_the_curve_never_falls_and_agrees_with_single_predictions() -> None:
    cost = CostModel()
    learn(cost, lambda n, h: 0.02 if n < 8 else 0.01, noise=0.2)
    curve = cost.curve(1, 5000, context_tokens=10.0)
    assert (np.diff(curve) > 0).all()
    for n in (1, 7, 500, 4000, 5001):
        assert cost.seconds(n, 10.0) == pytest.approx(curve[n - 1])
    assert cost.seconds(7.5) == pytest.approx((cost.seconds(7) + cost.seconds(8)) / 2)
    assert cost.slope(1) <= np.diff(curve).min() + 1e-12
    assert cost.seconds(10**6) > cost.seconds(5000), "beyond the table it goes on"


def test_times_through_zero_leave_a_step_its_time() -> None:
    """Where a line through zero explains what was measured, one token must not become free: it is divided by."""
    for context_tokens in (0.0, 100.0):
        cost = CostModel()
        for _ in range(40):
            for tokens in (1, 4, 16):
                # As an engine that is held up now and then measures them.
                cost.observe(tokens, 1e-4 + 0.01 * (tokens - 1), context_tokens * tokens)
        assert cost.fitted and cost.seconds(1, 0.0) > 0 and cost.slope(1) >= 0


def test_one_batch_size_tells_the_height_and_not_the_slope() -> None:
    """Without drafts a constant batch says nothing of what a token more costs: it must not look free."""
    cost = CostModel()
    for _ in range(500):
        cost.observe(64, 0.02, 64 * 300, 64)
        cost.observe(65, 0.02, 64 * 300, 64)
    assert cost.seconds(64) == pytest.approx(0.02, rel=0.02)
    assert cost.seconds(128) > 1.2 * cost.seconds(64)


def test_the_tail_does_not_wash_out_what_was_learned_at_a_large_batch() -> None:
    cost = CostModel()
    learn(cost, lambda n, h: 0.009 + 0.0003 * n)
    for _ in range(5000):
        cost.observe(1, 0.0093, 300, 1)
    assert cost.seconds(200) == pytest.approx(0.069, rel=0.15)


def test_a_machine_that_slows_down_is_followed() -> None:
    cost = CostModel()
    learn(cost, lambda n, h: 0.009 + 0.0003 * n)
    learn(cost, lambda n, h: 0.018 + 0.0006 * n, steps=6000)
    assert cost.seconds(64) == pytest.approx(0.0564, rel=0.15)


def test_what_verifying_costs_is_not_charged_to_steps_without_drafts() -> None:
    rng = random.Random(0)
    cost = CostModel()
    for _ in range(3000):
        requests = rng.randrange(1, 32)
        drafts = rng.choice([0, 0, 4]) * requests  # most steps of that many tokens verify
        n = requests + drafts
        cost.observe(n, 0.01 + 0.0002 * n + 0.004 * (drafts > 0), 0.0, requests)
    assert cost.c_verify == pytest.approx(0.004, rel=0.1)
    assert cost.seconds(20) == pytest.approx(0.014, rel=0.05)
    assert cost.seconds(20, 0.0, 4) == pytest.approx(0.018, rel=0.05)
    curve = cost.curve(16, 4)
    assert curve[1] - curve[0] == pytest.approx(0.0042, rel=0.1), "the first draft token pays for it"
    assert curve[2] - curve[1] == pytest.approx(0.0002, rel=0.1)


def test_the_context_that_draft_tokens_read_costs_what_it_does() -> None:
    """A quarter of what the first token of a request costs there, as measured on a CPU (`cost.json`)."""
    rng = random.Random(0)

    def true(requests: int, k: int, context: float) -> float:
        return 0.01 + 0.0002 * requests * (1 + k) + 2e-6 * context * (1 + 0.25 * k)

    cost = CostModel()
    for _ in range(4000):
        requests, k = rng.randrange(1, 33), rng.choice([0, 1, 2, 4])
        context = requests * rng.randrange(20, 1000)
        seconds = true(requests, k, context) * rng.lognormvariate(0, 0.05)
        cost.observe(requests * (1 + k), seconds, context, requests)
    for requests, context in ((4, 3000), (32, 30_000), (32, 1000)):
        curve = cost.curve(requests, 4 * requests, context)
        for k in (0, 1, 2, 4):
            assert curve[k * requests] == pytest.approx(true(requests, k, context), rel=0.05), (requests, k, context)
            assert cost.seconds(requests * (1 + k), context, requests) == pytest.approx(curve[k * requests])


def test_a_step_of_no_request_has_a_price() -> None:
    """The last requests of a batch ended in the same step; speculation was off from then on."""
    m = CostModel()
    m.c_drafts = 1e-6
    assert np.isfinite(m.curve(0, 4, 100.0)).all()


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), 61.0])
def test_times_that_cannot_be_are_left_out_and_counted(seconds: float) -> None:
    cost = CostModel()
    learn(cost, lambda n, h: 0.009 + 0.0003 * n)
    before = cost.seconds(50)
    for n in (4, 64):
        for _ in range(50):
            cost.observe(n, seconds)
    cost.observe(0, 0.01)
    assert cost.skipped == 101 and cost.seconds(50) == before


def test_a_surprise_brings_the_next_fit_forward() -> None:
    cost = CostModel()
    for n in [1, 2, 4, 8, 16, 32, 64] * 60:
        cost.observe(n, 0.01, 0, n)
    assert cost.seconds(200) < 0.03
    for _ in range(3):
        cost.observe(200, 0.1, 0, 64)
    assert cost.seconds(200, 0, 64) > 0.06


def test_memory_is_bounded() -> None:
    rng = random.Random(0)
    cost = CostModel()
    for _ in range(20_000):
        n = int(2 ** rng.uniform(0, 12))
        cost.observe(n, 0.01 + 1e-5 * n, 2 ** rng.uniform(0, 20), rng.randrange(1, 512))
    assert len(cost._cells) <= 256


def test_a_stored_fit_predicts_at_once_and_fades() -> None:
    cost = CostModel()
    learn(cost, lambda n, h: 0.009 + 0.0003 * n)
    again = CostModel()
    again.restore(json.loads(json.dumps(cost.state())))
    assert again.seconds(100) == pytest.approx(0.039, rel=0.1)
    learn(again, lambda n, h: 0.0045 + 0.00015 * n, steps=3000)
    assert again.seconds(100) == pytest.approx(0.0195, rel=0.15)


@pytest.mark.parametrize("values", [[5.0], [5.0, 1.0, 0.0, -1.0, 3.0], [5.0, 1.0, 0.0, 0.0, 3.0]])
def test_a_stored_fit_that_cannot_be_is_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="cell of the cost model"):
        CostModel().restore({"cells": [[1, 1, 1, *values]]})


def test_fitting_stays_off_the_step_path() -> None:
    """Not a timing test: the number of fits is what bounds the cost."""
    cost = CostModel()
    fits = 0
    original = cost._fit

    def counted() -> None:
        nonlocal fits
        fits += 1
        original()

    cost._fit = counted  # type: ignore[method-assign]
    start = time.monotonic()
    learn(cost, lambda n, h: 0.009 + 0.0003 * n, steps=3000)
    assert fits < 80 and time.monotonic() - start < 60
