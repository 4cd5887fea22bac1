from __future__ import annotations

from drafter_online.worth import COST, PATIENCE, WhenItPays, Worth

SAMPLES = [range(500)] * 4  # 2,000 tokens


def learned(*lengths: float) -> Worth:
    worth = Worth()
    for length in lengths:
        for _ in range(60):  # enough for the smoothed value to be there
            worth.observe(length)
    return worth


def test_a_version_is_published_when_its_gain_is_more_than_it_costs() -> None:
    worth = learned(1.5, 1.8)
    assert worth.pays(SAMPLES, 100, 100) and not worth.pays(SAMPLES, 99, 100)
    assert not worth.pays([range(int(COST))], 100, 100), "too few tokens to come"
    worth.published(0)
    assert not worth.pays(SAMPLES, 100, 100), "the engine has it"


def test_what_is_learned_after_a_shift_pays_although_it_was_better_before() -> None:
    worth = learned(1.5, 2.5)
    worth.published(0)
    assert not worth.pays(SAMPLES, 100, 100)
    for length in (1.2, 1.4):  # other traffic
        for _ in range(60):
            worth.observe(length)
    assert worth.pays(SAMPLES, 100, 100)


def test_an_update_waits_for_so_many_versions_of_the_policy() -> None:
    worth, always = Worth(2), Worth()
    assert not worth.waits(1), "nothing was published yet"
    for one in (worth, always):
        one.published(3)
    assert [worth.waits(policy) for policy in (3, 4, 5)] == [True, True, False]
    assert not worth.waits(0) and not worth.waits(1), "a policy that does not move, or starts again"
    assert not always.waits(3)


def test_without_a_gain_a_version_comes_late_and_not_never() -> None:
    worth = learned(2.0, 1.9)
    assert not worth.pays(SAMPLES, 100 * PATIENCE - 1, 100) and worth.pays(SAMPLES, 100 * PATIENCE, 100)
    assert not Worth().pays(SAMPLES, 100, 100)


# SpecBlock's rule: a round of training where its expected gain exceeds its cost, and only there.


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
