"""The life of a drafter version, as one table: offered, staged, on canary, then promoted, rolled back or refused.

                        DEFERRED ──stage──┐
                       defer ▲            ▼
    IDLE ──offer──▶ OFFERED ──stage──▶ STAGING ──ready──▶ STAGED ──swap──▶ CANARY ──promote──▶ PROMOTED
                       │ ▲                │                 │                │ └───roll back──▶ ROLLED_BACK
                       │ └──────lapse─────┼─────────────────┼────────────────┘
                       └──claim──▶ CANARY └────refuse───────┴──▶ REFUSED

The engine that swaps a version in, the replicas that share a store, and the service that offers versions to engines all
keep a `Life` for it; none of them decides by itself what may come next. A fleet does not see how an engine stages a
version: for it the engine *is* the canary from the moment it claims the version.

A version is promoted by PROMOTE after a canary, or by TRUST where another decision replaces one: an operator's,
or the canary of another engine. Verdicts only get worse: what was promoted may be rolled back, never the reverse.

    life = Life(7)
    life.apply(Event.OFFER)          # State.OFFERED
    life.apply(Event.PROMOTE)        # LifecycleError: version 7 is offered; ...

No threads, tensors or files; a `Life` that threads share has to be locked.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from drafter_online.errors import LifecycleError

Verdict = Literal["promoted", "rolled_back", "refused"]


class State(Enum):
    """Where a version is."""

    IDLE = "idle"  # no engine was offered it, or the offer was withdrawn
    OFFERED = "offered"  # an engine may take it: at its next step, or the first of several to claim it
    DEFERRED = "deferred"  # the engine sleeps; it is staged when the engine is awake
    STAGING = "staging"  # read, verified and loaded into the second copy of the drafter
    STAGED = "staged"  # waits for the start of a step, and for the other ranks
    CANARY = "canary"  # runs, and its drafts are compared with what the weights before reached
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled_back"
    REFUSED = "refused"
    SUPERSEDED = "superseded"  # a newer offer took its place before it had a verdict


class Event(Enum):
    """What happens to a version."""

    OFFER = "offer"
    WITHDRAW = "withdraw"
    DEFER = "defer"
    STAGE = "stage"
    READY = "ready"
    SWAP = "swap"
    CLAIM = "claim"  # fleet: an engine is its canary from now on
    LAPSE = "lapse"  # fleet: that engine left, died, or has no requests to judge by
    PROMOTE = "promote"
    TRUST = "trust"  # promoted without a canary here: an operator's word, or another engine's canary
    ROLL_BACK = "roll_back"
    REFUSE = "refuse"
    SUPERSEDE = "supersede"


TABLE: dict[tuple[State, Event], State] = {
    (State.IDLE, Event.OFFER): State.OFFERED,
    (State.OFFERED, Event.WITHDRAW): State.IDLE,
    (State.OFFERED, Event.DEFER): State.DEFERRED,
    (State.OFFERED, Event.STAGE): State.STAGING,
    (State.OFFERED, Event.CLAIM): State.CANARY,
    (State.OFFERED, Event.TRUST): State.PROMOTED,
    (State.OFFERED, Event.REFUSE): State.REFUSED,
    (State.OFFERED, Event.SUPERSEDE): State.SUPERSEDED,
    (State.DEFERRED, Event.STAGE): State.STAGING,
    (State.DEFERRED, Event.REFUSE): State.REFUSED,
    (State.DEFERRED, Event.SUPERSEDE): State.SUPERSEDED,
    (State.STAGING, Event.READY): State.STAGED,
    (State.STAGING, Event.REFUSE): State.REFUSED,
    (State.STAGED, Event.SWAP): State.CANARY,
    (State.STAGED, Event.TRUST): State.PROMOTED,
    (State.STAGED, Event.REFUSE): State.REFUSED,  # another rank could not stage it
    (State.STAGED, Event.SUPERSEDE): State.SUPERSEDED,
    (State.CANARY, Event.PROMOTE): State.PROMOTED,
    (State.CANARY, Event.ROLL_BACK): State.ROLLED_BACK,
    (State.CANARY, Event.REFUSE): State.REFUSED,  # fleet: the engine that claimed it could not load it
    (State.CANARY, Event.LAPSE): State.OFFERED,
    (State.CANARY, Event.SUPERSEDE): State.SUPERSEDED,  # fleet
    (State.PROMOTED, Event.ROLL_BACK): State.ROLLED_BACK,  # an operator, or an engine that was thought dead
    (State.PROMOTED, Event.REFUSE): State.REFUSED,
    (State.ROLLED_BACK, Event.REFUSE): State.REFUSED,
}
"""Every transition there is."""

BAD = frozenset({State.ROLLED_BACK, State.REFUSED})
"""No engine may run it."""


@dataclass(slots=True)
class Life:
    """One version's state. `version`: None for weights without a number."""

    version: int | None = None
    state: State = State.IDLE

    def can(self, event: Event) -> bool:
        """Whether the table has this event for the present state."""
        return (self.state, event) in TABLE

    def apply(self, event: Event) -> State:
        """Take the transition; returns the new state.

        Raises:
            LifecycleError: the table has none; the state is as it was.
        """
        after = TABLE.get((self.state, event))
        if after is None:
            possible = ", ".join(e.value for s, e in TABLE if s is self.state) or "nothing"
            raise LifecycleError(
                f"drafter-online: version {self.version} is {self.state.value}; {event.value} cannot follow, only "
                f"{possible} can."
            )
        self.state = after
        return after

    def judge(self, verdict: Verdict) -> State:
        """Take in a verdict of another; one that is better than the present state changes nothing.

        A promotion of what has no canary here is TRUST; a version that never ran cannot be rolled back and is refused.
        """
        if verdict == "promoted":
            events = [Event.PROMOTE, Event.TRUST]
        elif verdict == "rolled_back":
            events = [Event.ROLL_BACK] if self.state is State.ROLLED_BACK else [Event.ROLL_BACK, Event.REFUSE]
        else:
            events = [Event.REFUSE]
        event = next((e for e in events if self.can(e)), None)
        return self.state if event is None else self.apply(event)
