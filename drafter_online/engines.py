"""What engines say about themselves, checked, and what it adds up to per domain.

An engine sends its counts since it began; differences are taken here, so a message that is lost costs nothing. The
number of domains is bounded: what requests call themselves is not ours to trust.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from drafter_online.errors import WireError
from drafter_online.lifecycle import Verdict

MOST_DOMAINS = 64
OTHER = "other"
"""Where requests of further domains are counted."""

MOST_NAME = 128


class Hello(msgspec.Struct, frozen=True):
    """How an engine introduces itself."""

    name: str
    base: str  # `architecture.base_of` its target
    aux: list[int]  # auxiliary layers its drafter reads, in order


class Counts(msgspec.Struct, array_like=True):
    """Of one domain. `steps`: sum over decode steps of its requests; `drafts`: those that verified a draft."""

    requests: int = 0
    steps: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0

    def add(self, now: Counts, before: Counts) -> None:
        """Add what was counted between two reports; an engine that began anew counts from 0 again."""
        for name in self.__struct_fields__:
            late, early = getattr(now, name), getattr(before, name)
            setattr(self, name, getattr(self, name) + max(0, late - early if late >= early else late))

    @property
    def length(self) -> float | None:
        """Tokens emitted per request and decode step (accepted + 1)."""
        return self.emitted / self.steps if self.steps else None

    @property
    def rate(self) -> float | None:
        """Accepted / drafted tokens."""
        return self.accepted / self.drafted if self.drafted else None


class Trial(msgspec.Struct, array_like=True, frozen=True):
    """What an engine made of a version."""

    version: int
    verdict: Verdict
    reason: str = ""


class Status(msgspec.Struct, frozen=True):
    """What an engine says every second or two."""

    version: int  # of the drafter it runs; 0: as it was started
    busy: bool = False  # a version is being staged or on canary
    policy: int = 0  # policy version
    speculating: bool = True
    off: list[str] = []  # (drafter, batch) pairs that its guard switched off
    domains: dict[str, Counts] = {}
    trials: list[Trial] = []  # latest ones
    counts: dict[str, float] = {}  # captured, dropped, private, ...
    faults: list[str] = []


def read(body: dict[str, Any], kind: type[Any]) -> Any:
    """A message's body as `kind`.

    Raises:
        WireError: it does not fit.
    """
    try:
        return msgspec.convert(body, kind)
    except (msgspec.ValidationError, RecursionError) as e:
        raise WireError("malformed", f"its body is no {kind.__name__} ({e})") from e


@dataclass
class Engine:
    """One connected engine."""

    session: str
    hello: Hello
    status: Status | None = None  # None until its first report
    heard: float = field(default_factory=time.monotonic)
    offered: float = 0.0  # when it was last offered a version
    samples: int = 0

    @property
    def name(self) -> str:
        """As it calls itself."""
        return self.hello.name[:MOST_NAME]

    @property
    def version(self) -> int:
        """What it runs."""
        return self.status.version if self.status is not None else 0


class Engines:
    """All engines by session, and what their requests achieved by domain."""

    def __init__(self) -> None:
        self.by_session: dict[str, Engine] = {}
        self.domains: dict[str, Counts] = {}

    def __iter__(self) -> Iterator[Engine]:
        return iter([e for e in list(self.by_session.values()) if e.status is not None])

    def join(self, session: str, hello: Hello) -> None:
        """An engine was welcomed."""
        self.by_session[session] = Engine(session, hello)

    def leave(self, session: str) -> None:
        """It is gone."""
        self.by_session.pop(session, None)

    def report(self, session: str, status: Status) -> Engine | None:
        """An engine's report; the first one is what later ones are compared with."""
        engine = self.by_session.get(session)
        if engine is None:
            return None
        if engine.status is not None:
            for name, now in status.domains.items():
                self._of(name).add(now, engine.status.domains.get(name, Counts()))
        engine.status, engine.heard = status, time.monotonic()
        return engine

    def _of(self, name: str) -> Counts:
        name = name[:MOST_NAME]
        if name not in self.domains and len(self.domains) >= MOST_DOMAINS:
            name = OTHER
        return self.domains.setdefault(name, Counts())

    def total(self) -> Counts:
        """Over all domains."""
        out = Counts()
        for c in list(self.domains.values()):
            out.add(c, Counts())
        return out

    @property
    def policy(self) -> int:
        """The newest policy version that an engine samples from."""
        return max((e.status.policy for e in self if e.status is not None), default=0)

    @property
    def newest(self) -> int:
        """The newest drafter version that one runs."""
        return max((e.version for e in self), default=0)
