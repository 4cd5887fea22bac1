"""SpecBlock's rule: a round of training where its expected gain exceeds its cost, and only there."""

from __future__ import annotations

from drafter_online.when_to_train import WhenItPays


def window(rule: WhenItPays, length: float, seconds: float = 10.0, rows: int = 100) -> None:
    """The engine ran for `seconds`, and requests emitted `length` tokens per step."""
    rule.served(round(rows * length), rows, seconds)


def a_round(rule: WhenItPays, steps: int, cost: float) -> int:
    """The rest of a round that was allowed; the optimiser steps at its end."""
    end = steps + rule.every
    rule.trained(cost)
    assert all(rule.allows(s) for s in range(steps + 1, end))
    return end


def trained(cost: float, gain: float) -> tuple[WhenItPays, int]:
    """Two rounds of `cost` seconds that brought `gain` each; a third is to be decided on."""
    rule, steps, length = WhenItPays(10), 0, 1.0
    for _ in range(2):
        window(rule, length)
        assert rule.allows(steps), "the first ones say what a round costs and brings"
        steps, length = a_round(rule, steps, cost), length + gain
    window(rule, length)
    return rule, steps


def test_a_round_is_trained_where_it_is_cheaper_than_what_it_brings() -> None:
    # 10 s of steps at 2 tokens would take 10 * 0.5 / 2.5 = 2 s less with half a token more.
    for cost, allowed in ((1.9, True), (2.2, False)):
        rule, steps = trained(cost, 0.5)
        assert rule.allows(steps) == allowed and rule.skipped == (not allowed)


def test_it_waits_where_nothing_is_gained_any_more_and_begins_when_acceptance_falls() -> None:
    rule, steps = trained(0.5, 0.0)
    assert not rule.allows(steps)
    window(rule, 1.0)
    assert not rule.allows(steps), "the same again"
    window(rule, 0.8)
    assert rule.allows(steps), "what a policy update lost can be won back"


def test_without_feedback_there_is_no_round() -> None:
    rule = WhenItPays(10)
    assert not rule.allows(0)
    window(rule, 1.5)
    assert rule.allows(0) and rule.allows(9), "within a round it is not asked again"
    assert not rule.allows(10) and rule.rounds == 1


def test_more_traffic_makes_the_same_gain_worth_its_cost() -> None:
    rule, steps = trained(2.2, 0.5)
    window(rule, 2.0, seconds=20.0)
    assert rule.allows(steps)
