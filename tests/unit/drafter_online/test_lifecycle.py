"""The table of a version's life: closed, every state reachable, and no verdict without what it rests on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_online.errors import LifecycleError
from drafter_online.lifecycle import TABLE, Life, State

OVER = {State.PROMOTED, State.ROLLED_BACK, State.REFUSED, State.SUPERSEDED}


@given(st.lists(st.sampled_from(list(State)), max_size=40))
def test_no_sequence_of_states_leaves_the_table(states: list[State]) -> None:
    life, been = Life(7), [State.OFFERED]
    for after in states:
        if after in TABLE.get(been[-1], ()):
            life.become(after)
            been.append(after)
        else:
            with pytest.raises(LifecycleError, match=rf"version 7 is {been[-1].value}; it cannot become {after.value}"):
                life.become(after)
        assert life.state is been[-1]
    if State.CANARY in been:
        at = been.index(State.CANARY)
        assert been[at - 2 : at] == [State.STAGING, State.STAGED], "weights run only after they were verified"
    assert State.ROLLED_BACK not in been or State.CANARY in been
    assert not OVER & set(been[:-1]), "an end is an end"


def test_every_state_is_reached_and_has_a_way_to_an_end() -> None:
    assert set(TABLE) == set(State) - OVER
    for start in TABLE:
        seen, todo = {start}, [start]
        while todo:
            new = TABLE.get(todo.pop(), set()) - seen
            seen |= new
            todo += new
        assert seen & OVER
        assert start is not State.OFFERED or seen == set(State)
