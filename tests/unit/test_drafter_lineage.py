"""What two trainings that share a store know of each other's steps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from drafter_online.lineage import KEY, Lineage, read


def test_taking_turns_goes_on_from_the_others_weights() -> None:
    a, b = Lineage("a"), Lineage("b")
    a.own += 10
    assert b.share(a.steps()) == 1.0
    b.take(a.steps())
    b.own += 5
    assert a.share(b.steps()) == 1.0 and b.share(a.steps()) == 0.0
    a.take(b.steps())
    assert a.steps() == b.steps() == {"a": 10, "b": 5}


def test_side_by_side_they_meet_in_the_average_by_steps() -> None:
    a, b = Lineage("a", 10, {}), Lineage("b", 5, {"a": 10})
    a.own += 15
    assert a.share(b.steps()) == 5 / 20 and b.share(a.steps()) == 15 / 20
    a.take(b.steps())
    assert a.steps() == {"a": 25, "b": 5} and b.share(a.steps()) == 1.0
    assert a.share(a.steps()) == 0.0


def test_weights_that_began_apart_are_not_averaged() -> None:
    a, b = Lineage("a", 3, {}), Lineage("b", 100, {})
    assert b.share(a.steps()) == 1.0, "there is nothing in common: one of the two is dropped"
    b.take(a.steps())
    assert b.steps() == {"a": 3} and b.name != "b", "what comes next must not pass for the steps that are gone"
    b.own += 1
    assert a.share(b.steps()) == 1.0


def test_what_says_nothing_has_nothing_new() -> None:
    assert Lineage("a", 3, {}).share(read({})) == 0.0
    assert read({KEY: {"a": 2, "b": "x", "c": -1}}) == {"a": 2} and read({KEY: [1]}) == {}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("abc"), st.integers(0, 5)), max_size=30))
def test_steps_are_never_lost_or_counted_twice(events: list[tuple[str, str, int]]) -> None:
    """Whoever trains and whoever meets whom, in any order, once all began from the same steps."""
    made = {name: 1 for name in "abc"}
    all_of = {name: Lineage(name, 1, {n: 1 for n in "abc" if n != name}) for name in "abc"}
    for who, other, n in events:
        all_of[who].own += n
        made[who] += n
        theirs = all_of[other].steps()
        share = all_of[who].share(theirs)
        assert 0.0 <= share <= 1.0
        if share:
            all_of[who].take(theirs)
        assert all(k <= made[name] for name, k in all_of[who].steps().items())
        assert all_of[who].share(theirs) == 0.0
    for who in "abc":
        for other in "abc":
            all_of[who].take(all_of[other].steps())
    assert all_of["a"].steps() == made
