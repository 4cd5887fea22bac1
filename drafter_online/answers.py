"""What the daemon tells engines besides versions: how its training goes, and what became of what they asked for."""

from __future__ import annotations

import msgspec


class Progress(msgspec.Struct, frozen=True):
    """In answer to each report of an engine. `loss` and `terms` are of the latest step; None before the first."""

    steps: int = 0
    tokens: int = 0
    loss: float | None = None
    terms: dict[str, float] = {}
    length: float = 1.0  # acceptance length on the latest training windows
    samples: int = 0
    step_age: float = 0.0  # seconds that the running micro-step has taken
    hangs: str | None = None  # why it is taken for one that hangs


class Errand(msgspec.Struct, frozen=True):
    """What an engine asks for by `save` and `load`: a copy of the daemon's state in a folder, or from one."""

    id: int
    folder: str


class Done(msgspec.Struct, frozen=True):
    """What became of an errand. Neither done nor an error: this daemon's state is no job's."""

    id: int
    done: bool
    error: str | None = None
