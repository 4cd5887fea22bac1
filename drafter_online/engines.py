"""The messages between engines and the daemon, validated, and the sums of the engines' requests per domain.

An engine sends its counts since it began; differences are taken here, so a message that is lost costs nothing. The
number of domains is bounded: what requests call themselves is not ours to trust.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from drafter_online.errors import SampleError, WireError
from drafter_online.samples import Sample
from drafter_online.versions import Verdict

if TYPE_CHECKING:
    from drafter_online.model import TrainedDrafter

MOST_DOMAINS = 64
OTHER = "other"
"""Where requests of further domains are counted."""

MOST_NAME = 128


class Hello(msgspec.Struct, frozen=True):
    """How an engine introduces itself."""

    name: str
    base: str  # `architecture.base_of` its target
    aux: list[int]  # auxiliary layers its drafter reads, in order


class DomainCounts(msgspec.Struct, array_like=True):
    """Of one domain. `steps`: sum over decode steps of its requests; `drafts`: those that verified a draft."""

    requests: int = 0
    steps: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0

    def add(self, now: DomainCounts, before: DomainCounts) -> None:
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


class VersionVerdict(msgspec.Struct, array_like=True, frozen=True):
    """An engine's verdict on a version that it had on canary."""

    version: int
    verdict: Verdict
    reason: str = ""


class Status(msgspec.Struct, frozen=True):
    """An engine's report, sent every second or two."""

    version: int  # of the drafter it runs; 0: as it was started
    busy: bool = False  # a version is on its way, being staged or on canary
    policy: int = 0  # policy version
    speculating: bool = True
    off: list[str] = []  # (drafter, batch) pairs that its guard switched off
    domains: dict[str, DomainCounts] = {}
    verdicts: list[VersionVerdict] = []  # the latest
    counts: dict[str, float] = {}  # captured, dropped, private, ...
    faults: list[str] = []
    seconds: float = 0.0  # that its steps have taken


class Progress(msgspec.Struct, frozen=True):
    """The daemon's answer to each `Status`. `loss` and `terms` are of the latest step; None before the first."""

    steps: int = 0
    tokens: int = 0
    loss: float | None = None
    terms: dict[str, float] = {}
    length: float = 1.0  # acceptance length on the latest training windows
    samples: int = 0
    step_age: float = 0.0  # seconds that the running micro-step has taken
    hangs: str | None = None  # why it is taken for one that hangs
    engines: int = 1  # that are connected
    idle: dict[str, float] = {}  # of training that yields to an engine: seconds and counts since the start
    levels: dict[str, float] = {}  # of the same: how long the engine waited for it, and what that costs


class CheckpointRequest(msgspec.Struct, frozen=True):
    """What an engine asks for by `save` and `load`: a copy of the daemon's state in a folder, or from one."""

    id: int
    folder: str


class Done(msgspec.Struct, frozen=True):
    """What became of a checkpoint request. Neither done nor an error: this daemon's state is no job's."""

    id: int
    done: bool
    error: str | None = None


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
class ConnectedEngine:
    """One connected engine."""

    hello: Hello
    status: Status = field(default_factory=lambda: Status(version=0))
    reported: bool = False  # `status` is its own
    last_message: float = field(default_factory=time.monotonic)
    offered: float = 0.0  # when it was last offered a version
    samples: int = 0

    @property
    def name(self) -> str:
        """As it calls itself."""
        return self.hello.name[:MOST_NAME]


def refusal(drafter: TrainedDrafter, hello: Hello) -> str | None:
    """Why an engine is not one that this head drafts for; None where it is."""
    if hello.base != drafter.base:
        return f"this daemon trains a drafter for the target {drafter.base!r}, and the engine runs {hello.base!r}"
    if tuple(hello.aux) != drafter.aux:
        return f"this daemon's head reads the target's layers {list(drafter.aux)}, and the engine's reads {hello.aux}"
    return None


def check_sample(drafter: TrainedDrafter, sample: Sample) -> None:
    """Refuse what is not of the drafter's target.

    Raises:
        SampleError: hidden states have another width, or a token is outside the target's vocabulary.
    """
    widths = {"hidden_states": drafter.hidden * len(drafter.aux), "verifier_last_hidden_states": drafter.hidden}
    for name, want in widths.items():
        have = getattr(sample, name).shape[1]
        if have != want:
            raise SampleError(f"a sample is refused: `{name}` is {have} wide, and this target's are {want}.")
    head = getattr(drafter, "head", None)  # whose own vocabulary may have fewer tokens
    vocabulary = int(drafter.vocabulary if head is None else head.config.transformer_layer_config.vocab_size)
    v = sample.verify
    for name, ids in (("input_ids", sample.input_ids), ("proposed", v.proposed), ("top_ids", v.top_ids)):
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
            raise SampleError(f"a sample is refused: `{name}` has a token outside the vocabulary of {vocabulary}.")


class Engines:
    """All engines by session, and what their requests achieved by domain."""

    def __init__(self) -> None:
        self.by_session: dict[str, ConnectedEngine] = {}
        self.domains: dict[str, DomainCounts] = {}
        self.seconds = 0.0  # of their steps

    def __iter__(self) -> Iterator[ConnectedEngine]:
        return iter([e for e in list(self.by_session.values()) if e.reported])

    def report(self, session: str, status: Status) -> ConnectedEngine | None:
        """An engine's report; the first one is what later ones are compared with."""
        engine = self.by_session.get(session)
        if engine is None:
            return None
        if engine.reported:
            self.seconds += max(0.0, status.seconds - engine.status.seconds)
            for name, now in status.domains.items():
                known = name[:MOST_NAME]
                if known not in self.domains and len(self.domains) >= MOST_DOMAINS:
                    known = OTHER
                before = engine.status.domains.get(name, DomainCounts())
                self.domains.setdefault(known, DomainCounts()).add(now, before)
        engine.status, engine.reported, engine.last_message = status, True, time.monotonic()
        return engine

    def total(self) -> DomainCounts:
        """Over all domains."""
        out = DomainCounts()
        for c in list(self.domains.values()):
            out.add(c, DomainCounts())
        return out

    @property
    def policy(self) -> int:
        """The newest policy version that an engine samples from."""
        return max((e.status.policy for e in self), default=0)

    @property
    def newest(self) -> int:
        """The newest drafter version that one runs."""
        return max((e.status.version for e in self), default=0)

    @property
    def collapsed(self) -> str | None:
        """One sentence without its full stop where engines have switched drafters off, else None."""
        off = sorted(e.name for e in self if e.status.off)
        return f"drafters are off, because too little was accepted, on {', '.join(off)}" if off else None

    @property
    def degraded(self) -> str | None:
        """Faults of the engines, else None."""
        faults = sorted({f for e in self for f in e.status.faults})
        return f"engines degraded: {'; '.join(faults[:4])}"[:500] if faults else None
