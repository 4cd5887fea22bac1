"""The interface of drafters, and their registry by the names of `proposal.drafters`.

A drafter proposes draft tokens with its own estimate of their acceptance, which is calibrated (`confidence.py`). The
step asks the drafters that cost no forward pass in the order of the configuration and takes the first proposal; the
draft head, which the engine runs, is asked for those that it would serve better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from rollspec.config import RollspecConfig
from rollspec.drafting.requests import Request
from rollspec.proposal.base import NO_DRAFT, Draft
from rollspec.proposal.history import History

__all__ = ["DRAFTERS", "NO_DRAFT", "Draft", "Drafter", "register_drafter"]


class Drafter(Protocol):
    """Proposes draft tokens. Per step and request: `observe`, `propose`; then `store_all`. One thread."""

    def __init__(self, name: str, config: RollspecConfig, history: History) -> None:
        """`name`: of its registration. `history`: past responses, which drafters share."""

    def begin(self, r: Request) -> None:
        """A request begins; `r.output` holds the tokens that it starts from."""

    def observe(self, r: Request) -> None:
        """The request emitted `r.emitted`; a proposal is asked for next."""

    def propose(self, r: Request, room: int) -> Draft | None:
        """A draft of at most `room` tokens to follow the request's output; None or an empty one for no proposal."""
        return None

    def propose_all(self, asked: Sequence[Request], rooms: Sequence[int]) -> Sequence[Draft | None]:
        """`propose` for many requests, for drafters that do it in one go."""
        return [self.propose(r, room) for r, room in zip(asked, rooms, strict=True)]

    def store_all(self, running: Sequence[Request], wait: bool) -> None:
        """Keep what was emitted; the step's drafts are handed over. `wait`: nothing is looked up now; it may wait."""

    def finish(self, r: Request) -> None:
        """The request ended or was aborted; nothing of a private one may be kept."""


D = TypeVar("D", bound=type[Drafter])

DRAFTERS: dict[str, type[Drafter]] = {}


def register_drafter(*names: str) -> Callable[[D], D]:
    """Make a class known by `names`."""

    def register(cls: D) -> D:
        for name in names:
            DRAFTERS[name] = cls
        return cls

    return register
