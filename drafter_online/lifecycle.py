"""The life of a drafter version in one engine, as one table: staged, swapped in, then promoted, rolled back or refused.

    OFFERED ──▶ STAGING ──▶ STAGED ──▶ CANARY ──▶ PROMOTED, ROLLED_BACK
       │   DEFERRED ▲          └── without a canary ──▶ PROMOTED
       └──────┴─────┴─────── REFUSED, SUPERSEDED ──────┘

Which engine has a version on canary is `release`'s, and the store keeps what became of it (`Versions.record`).

    life = Life(7)
    life.become(State.STAGING)
    life.become(State.PROMOTED)      # LifecycleError: version 7 is staging; ...
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from drafter_online.errors import LifecycleError

Verdict = Literal["promoted", "rolled_back", "refused"]


class State(Enum):
    """Where a version is."""

    OFFERED = "offered"  # the engine may take it at its next step
    DEFERRED = "deferred"  # the engine sleeps; it is staged when the engine is awake
    STAGING = "staging"  # read, verified and loaded into the second copy of the drafter
    STAGED = "staged"  # waits for the start of a step, and for the other ranks
    CANARY = "canary"  # runs, and its drafts are compared with what the weights before reached
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled_back"
    REFUSED = "refused"
    SUPERSEDED = "superseded"  # a newer offer took its place before it had a verdict


TABLE: dict[State, set[State]] = {
    State.OFFERED: {State.DEFERRED, State.STAGING, State.REFUSED, State.SUPERSEDED},
    State.DEFERRED: {State.STAGING, State.REFUSED, State.SUPERSEDED},
    State.STAGING: {State.STAGED, State.REFUSED},
    # Refused: another rank could not stage it. Promoted: another engine's canary, or an operator, decided.
    State.STAGED: {State.CANARY, State.PROMOTED, State.REFUSED, State.SUPERSEDED},
    State.CANARY: {State.PROMOTED, State.ROLLED_BACK},
}
"""Every transition there is."""


@dataclass(slots=True)
class Life:
    """One version's state. `version`: None for weights without a number."""

    version: int | None = None
    state: State = State.OFFERED

    def become(self, after: State) -> None:
        """Take the transition.

        Raises:
            LifecycleError: the table has none; the state is as it was.
        """
        possible = TABLE.get(self.state, set())
        if after not in possible:
            raise LifecycleError(
                f"drafter-online: version {self.version} is {self.state.value}; it cannot become {after.value}, only "
                f"{', '.join(sorted(s.value for s in possible)) or 'nothing else'}."
            )
        self.state = after
