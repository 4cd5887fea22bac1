from __future__ import annotations

import json

import numpy as np
import pytest

from rollspec.drafting.requests import HeadPart
from rollspec.proposal.router import HeadAcceptance, PassCost, best_passes, worth
from rollspec.proposal.router import gains as gains_of


def test_worth_counts_what_pays() -> None:
    assert worth([0.9, 0.5, 0.1], 0.2) == pytest.approx(0.7 + 0.3)
    assert worth([], 0.2) == worth([0.1], 0.2) == 0.0


def test_acceptance_follows_what_it_sees() -> None:
    a = HeadAcceptance(3)
    for _ in range(1000):
        a.observe(1, 2)  # the first token is accepted, the second rejected, the third never verified
    assert a.rates[0] > 0.95 and a.rates[1] < 0.05
    assert a.rates[2] == pytest.approx(a.rates[1]), "nothing but the position before it is known of it"
    a.changed()
    assert 0.05 < a.rates[1] < 0.6, "new weights are hoped for again"
    assert not a.measured.any(), "nothing was seen of them"


def test_acceptance_and_costs_are_kept() -> None:
    a, again = HeadAcceptance(3), HeadAcceptance(2)
    for _ in range(100):
        a.observe(1, 2)
    again.restore(json.loads(json.dumps(a.state())))
    assert again.rates == pytest.approx(a.rates[:2]) and again.measured == pytest.approx([1.0, 0.0])
    for bad in (
        {},
        {**a.state(), "accepted": [200.0]},
        {**a.state(), "tries": [float("nan")]},
        {**a.state(), "accepted": 1},
    ):
        b = HeadAcceptance(1)
        with pytest.raises((ValueError, KeyError, TypeError)):
            b.restore(bad)
        assert b.rates == pytest.approx([0.6])
    c, d = PassCost(), PassCost()
    c.observe(4, 2, 0.004)
    d.restore(json.loads(json.dumps(c.state())))
    assert d.seconds(4, 2, 1.0) == c.seconds(4, 2, 1.0) and d.each == c.each
    with pytest.raises(ValueError, match="passes"):
        d.restore({"each": float("inf"), "cells": []})


def test_a_request_that_is_drafted_badly_is_trusted_less() -> None:
    rates = np.array([0.8, 0.8])
    good, bad = HeadPart(), HeadPart()
    for _ in range(50):
        good.record(2, 2, rates)
        bad.record(0, 1, rates)
    assert bad.trust < 0.3 and 1.0 < good.trust < 1.3
    chains = HeadAcceptance(2).expected([good.trust, bad.trust])
    assert chains.shape == (2, 2) and (chains[0] > chains[1]).all() and (chains <= 1.0).all()


def test_passes_are_run_only_where_they_gain_more_than_they_cost() -> None:
    chains = np.cumprod(np.full((8, 4), 0.8), axis=1)
    gains = gains_of(chains, [0.0] * 8, 0.05)
    assert gains[0] == 0.0 and (np.diff(gains) > 0).all()
    free, dear = np.zeros(5), np.arange(5) * 1.0
    assert best_passes(gains, free, 100.0, 4) == 4
    assert best_passes(gains, free, 100.0, 2) == 2
    assert best_passes(gains, dear, 100.0, 4) == 0
    middle = np.arange(5) * 0.035  # a pass costs what 3.5 tokens take
    assert 0 < best_passes(gains, middle, 100.0, 4) < 4
    # Requests with a suffix chain that is worth as much want none.
    assert gains_of(chains, [5.0] * 8, 0.05).sum() == 0.0


def test_pass_cost_is_learned_per_batch() -> None:
    c = PassCost()
    assert c.seconds(4, 2, 0.02) == pytest.approx(2 * 0.05 * 0.02)
    for _ in range(40):
        c.observe(4, 2, 0.004)
        c.observe(64, 2, 0.010)
    assert c.seconds(4, 2, 0.02) == pytest.approx(0.004) and c.seconds(64, 2, 0.02) == pytest.approx(0.010)
    assert c.seconds(4, 4, 0.02) == pytest.approx(0.008) and c.seconds(4, 0, 0.02) == 0.0
    c.observe(4, 2, 10.0)  # one hiccup
    assert c.seconds(4, 2, 0.02) < 0.0045


def test_a_first_pass_that_compiles_does_not_make_a_head_rest() -> None:
    c = PassCost()
    for _ in range(40):
        c.observe(64, 1, 0.060)
    assert c.seconds(64, 1, 0.2) == pytest.approx(0.060)
    unseen = 0.05 * 0.2  # a pass of one request is not one of 64
    assert c.seconds(1, 1, 0.2) == pytest.approx(unseen)
    c.observe(1, 1, 0.095)
    assert c.seconds(1, 1, 0.2) == pytest.approx(unseen) and c.seconds(1, 3, 0.2) == pytest.approx(3 * unseen)
    c.observe(1, 1, 0.012)
    assert c.seconds(1, 1, 0.2) == pytest.approx(0.012) and c.seconds(1, 3, 0.2) == pytest.approx(0.036)
    for _ in range(2):  # it is so
        c.observe(16, 2, 0.050)
    assert c.seconds(16, 2, 0.2) == pytest.approx(0.050)


def test_a_probe_bounds_what_a_pass_costs() -> None:
    c = PassCost()
    c.rested(4, 2, 0.5, 0.0)
    assert c.seconds(4, 2, 0.02) == pytest.approx(2 * 0.05 * 0.02), "nothing was timed: a cold pass says nothing"
    for _ in range(2):
        c.observe(4, 2, 0.1)
    c.rested(4, 2, 0.3, 0.0)
    c.rested(4, 2, -1.0, 0.0)
    assert c.seconds(4, 2, 0.02) == 0.1
    c.rested(4, 2, 0.02, 0.0)
    assert c.seconds(4, 2, 1.0) == 0.02
    c.observe(4, 2, 0.01)
    assert 0.01 <= c.seconds(4, 2, 1.0) < 0.02, "and what is timed counts soon"


def test_what_was_missed_is_known_once_it_was_read_twice() -> None:
    c = PassCost()
    assert c.after_rest(64) is None
    c.rested(64, 1, 0.040, 2.0)  # compiled
    assert c.after_rest(64) is None
    c.rested(64, 1, 0.040, 0.400)
    assert c.after_rest(64) == pytest.approx((0.440, 0.400)) and c.after_rest(1) is None
    for late in (0.5, 0.6):  # contexts grow
        c.rested(64, 1, 0.040, late)
    assert c.after_rest(64) == pytest.approx((0.540, 0.500))
