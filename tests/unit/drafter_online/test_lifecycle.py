"""The table of a version's life: closed, every state reachable, and no verdict without what it rests on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_online.errors import LifecycleError
from drafter_online.lifecycle import BAD, TABLE, Event, Life, State

OVER = {State.PROMOTED, State.ROLLED_BACK, State.REFUSED, State.SUPERSEDED}
EVENTS = st.lists(st.sampled_from(list(Event)), max_size=40)


def play(events: list[Event]) -> list[tuple[State, Event, State]]:
    """The transitions that a life takes of these events; the others must change nothing."""
    life, taken = Life(7), []
    for event in events:
        before = life.state
        if life.can(event):
            taken.append((before, event, life.apply(event)))
        else:
            with pytest.raises(LifecycleError, match=f"version 7 is {before.value}; {event.value} cannot follow"):
                life.apply(event)
            assert life.state is before
    return taken


@given(EVENTS)
def test_no_sequence_of_events_leaves_the_table(events: list[Event]) -> None:
    for before, event, after in play(events):
        assert TABLE[before, event] is after


@given(EVENTS)
def test_a_verdict_follows_a_canary_or_somebodys_word_for_one(events: list[Event]) -> None:
    ran = False  # the version came to run somewhere
    for before, event, after in play(events):
        if event is Event.PROMOTE:
            assert before is State.CANARY
        if event is Event.ROLL_BACK:
            assert before in (State.CANARY, State.PROMOTED) and ran
        if after is State.PROMOTED:
            assert event is Event.TRUST or before is State.CANARY
        ran = ran or after in (State.CANARY, State.PROMOTED)


@given(EVENTS)
def test_verdicts_only_get_worse_and_an_end_is_an_end(events: list[Event]) -> None:
    order = [State.PROMOTED, State.ROLLED_BACK, State.REFUSED]
    for before, _, after in play(events):
        if before in OVER:
            assert before in order and order.index(after) > order.index(before)
        if before in BAD:
            assert after in BAD


@given(EVENTS)
def test_an_engines_swap_is_staged_before_its_canary(events: list[Event]) -> None:
    """Without the two events that only a fleet has, weights run only after they were verified and staged."""
    states = [State.IDLE]
    for _, _, after in play([e for e in events if e is not Event.CLAIM]):
        states.append(after)
        if after is State.CANARY:
            assert states[-3:] == [State.STAGING, State.STAGED, State.CANARY]


def test_every_state_is_reached_and_has_a_way_to_an_end() -> None:
    assert {s for s, _ in TABLE} | set(TABLE.values()) == set(State) and {e for _, e in TABLE} == set(Event)
    for start in State:
        seen, todo = {start}, [start]
        while todo:
            here = todo.pop()
            for (state, _), after in TABLE.items():
                if state is here and after not in seen:
                    seen.add(after)
                    todo.append(after)
        assert seen & OVER  # the swap has ended
        if start is State.IDLE:
            assert seen == set(State)


@pytest.mark.parametrize(
    ("state", "verdicts", "end"),
    [
        (State.CANARY, ["promoted"], State.PROMOTED),
        (State.CANARY, ["promoted", "rolled_back"], State.ROLLED_BACK),
        (State.CANARY, ["rolled_back", "promoted"], State.ROLLED_BACK),
        (State.CANARY, ["rolled_back", "refused", "rolled_back"], State.REFUSED),
        (State.OFFERED, ["promoted"], State.PROMOTED),  # an operator's word
        (State.OFFERED, ["rolled_back", "promoted"], State.REFUSED),
    ],
)
def test_of_several_verdicts_the_worst_counts(state: State, verdicts: list[str], end: State) -> None:
    life = Life(7, state)
    for verdict in verdicts:
        life.judge(verdict)  # type: ignore[arg-type]
    assert life.state is end
