"""Running requests, in parts by owner: the engine's facts, the suffix drafter's, the proposals, the head's state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollspec.proposal.base import NO_DRAFT, Draft, TokenArray, Turn, as_tokens
from rollspec.proposal.history import Response, Spans, extend_spans
from rollspec.proposal.router import TRUST_WEIGHT
from rollspec.tuning.strategy import Vector
from rollspec.tuning.tuner import MODEL_DRAFTERS, Plan


@dataclass(slots=True)
class Proposal:
    """A drafter's latest proposal for one request."""

    draft: Draft = field(default_factory=lambda: NO_DRAFT)
    cells: Sequence[int] = ()  # its calibration cells
    expected: Sequence[float] = ()  # its calibrated cumulative acceptance, per token
    kept: int = 0  # tokens of it that a stop rule keeps, or all
    allowed: int = 0  # tokens of it that the verification budget allows, before the arm's own limit

    def clear(self) -> None:
        """Nothing is proposed."""
        self.draft, self.cells, self.expected, self.allowed = NO_DRAFT, (), (), 0


@dataclass(slots=True)
class HeadPart(Proposal):
    """The draft head's part. Where the head was not run, `expected` is an estimate and `draft` is empty.

    `allowed` counts tokens of the proposal that is preferred, the head's or the model-free one.
    """

    serves: bool = False  # whether the head's proposal is preferred to the model-free one
    sent: bool = False  # whether the head's proposal is what the engine was handed to verify
    version: int = 0  # of the weights that drafted what was sent
    accepted_sum: float = 0.0  # draft tokens of this request that the target emitted, discounted
    hoped: float = 0.0  # and how many that were expected to be

    @property
    def trust(self) -> float:
        """This request's own record against that of all requests."""
        return (self.accepted_sum + TRUST_WEIGHT) / (self.hoped + TRUST_WEIGHT)

    def record(self, accepted: int, known: int, rates: Vector) -> None:
        """Learn from a draft; the past counts half after some forty tokens. `rates`: acceptance per position, [k]."""
        if known:
            self.accepted_sum = 0.98**known * self.accepted_sum + accepted
            self.hoped = 0.98**known * self.hoped + float(rates[:known].sum())


@dataclass(slots=True)
class Part:
    """What an aborted rollout has left in the corpora, until it goes on."""

    sequence: int  # of the group's corpus
    wide: int | None  # of the global corpus
    length: int  # in tokens


@dataclass(slots=True)
class Group:
    """The corpus of one prompt and which sequences are in it."""

    key: str
    corpus: Any
    head: TokenArray  # prompt tail that starts each response in the corpus
    next_seq: int = 1
    running: set[int] = field(default_factory=set)  # sequences of requests that run
    bytes: int = 0
    sequences: dict[int, int] = field(default_factory=dict)  # sequence id -> policy version
    versions: set[int] = field(default_factory=set)
    ended: dict[int, list[int]] = field(default_factory=dict)  # by turn: lengths of finished responses, ascending
    parts: dict[str, Part] = field(default_factory=dict)  # by origin


@dataclass(slots=True)
class Replay:
    """One request's old response under the same noise (`reuse.mode: replay`), drafted at the same position while it
    holds. `at`: leading tokens repeated so far. `alive`: nothing has differed yet.
    """

    tokens: list[int]
    at: int = 0
    alive: bool = True

    def advance(self, new: Sequence[int]) -> None:
        """The request emitted `new`."""
        if not self.alive:
            return
        for token in new:
            if self.at == len(self.tokens) or self.tokens[self.at] != token:
                self.alive = False
                return
            self.at += 1

    def draft(self, most: int) -> Draft | None:
        """The next `most` tokens at most of the old response; None once it differed or is over."""
        if not self.alive or self.at == len(self.tokens):
            return None
        tokens = self.tokens[self.at : self.at + most]
        return Draft(tokens, [1.0] * len(tokens), "replay", self.at)  # what 1.0 is worth is calibrated

    def identical(self, length: int) -> bool:
        """Whether a response that ended with `length` tokens repeated the old one whole."""
        return self.alive and self.at == length == len(self.tokens)


@dataclass(slots=True)
class SuffixPart:
    """What the drafters that remember responses keep of a request."""

    group: Group | None = None  # the corpus of its prompt
    sequence: int = 0  # its sequence there
    context: list[int] = field(default_factory=list)  # last tokens of prompt and response, as a corpus matches them
    unstored: list[int] = field(default_factory=list)  # emitted, and not in the corpus yet
    replay: Replay | None = None  # its response of an earlier epoch, under the same noise
    counted: tuple[int, ...] = (0, 0, 0, 0)  # what of `reused` an aborted part of it has counted already
    ended: Sequence[int] = ()  # lengths of finished responses to its prompt, ascending
    remaining: float = 0.0  # expected tokens until its end
    remaining_at: int = 0  # output length from which on that is too old

    def reused(self, length: int) -> tuple[int, ...]:
        """For `EngineStats.reuse`, of a response of `length` tokens that had an old one to repeat."""
        assert self.replay is not None
        return 1, length, self.replay.at, int(self.replay.identical(length))


@dataclass(slots=True)
class Request:
    """One running request."""

    # Given by the engine when it began.
    req_id: str
    key: str  # of its rollout's prompt; siblings, past epochs and later turns share it
    prompt: TokenArray  # [n] int32
    version: int  # of the policy that its rollout began under
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()  # tokens that end it
    output: list[int] = field(default_factory=list)  # emitted so far
    began_at: int = 0  # tokens of `output` that were there from the start
    min_output: int = 0  # tokens of `output` before which no stop token may come
    stream: int | None = None  # key of its noise, where that is kept over epochs
    origin: str | None = None  # names the rollout, where it may be made of several requests
    spans: Spans = ()  # which policy version sampled which tokens of `output`; the last one goes on
    known: int = 0  # leading tokens of `output` that an earlier request of its origin has added to what is remembered
    private: bool = False  # others are not drafted for from its output, and nothing of it is kept
    turn: Turn | None = None  # of a rollout with tools, whose turns share what is remembered
    thinks: bool = False  # what it emits next, where the model's thinking has tokens around it
    ended: bool = False  # by its stop token or its limit
    after: int = 0  # how many requests had ended when it began, since the last drain
    counted: int = 1  # tokens of `output` until the last drain; the first comes with the prompt
    # Given by the engine after the last step.
    place: int = 0  # in the batch
    emitted: Sequence[int] = ()  # accepted draft tokens and the target's own
    verified: int = 0  # draft tokens
    accepted: int = 0  # of these, at most as many as were emitted
    # What was proposed after it.
    asked: bool = False  # whether a model-free draft was looked up
    lookup: Proposal = field(default_factory=Proposal)
    head: HeadPart = field(default_factory=HeadPart)
    suffix: SuffixPart = field(default_factory=SuffixPart)

    def verify(self, place: int, tokens: Sequence[int], verified: int) -> None:
        """The engine computed `tokens` for it, at `place` of the batch, and verified `verified` draft tokens.

        A verify step may emit tokens past a stop token or the limit; the engine's scheduler cuts what follows.
        """
        self.place, self.verified = place, verified
        self.accepted = len(tokens) - 1
        if self.accepted:
            tokens = self._cut(tokens)
            self.accepted = min(self.accepted, len(tokens))
        self.emitted = tokens

    def append(self) -> None:
        """Take what was emitted as its output."""
        self.output.extend(self.emitted)
        self.ended = len(self.output) >= self.max_tokens or self.output[-1] in self.stop_ids

    def decoded(self) -> tuple[int, int]:
        """How many had ended when it began, and what it emitted in decode steps: both since the last call."""
        out = self.after, max(0, len(self.output) - self.counted)
        self.after, self.counted = 0, max(self.counted, len(self.output))
        return out

    def drop(self, kept: int, version: int) -> None:
        """The engine dropped its output but for `kept` tokens; policy `version` samples the rest again."""
        del self.output[kept:]
        self.ended = False
        self.spans = extend_spans(self.spans, kept, version)

    @property
    def root(self) -> TokenArray:
        """The prompt of its rollout, which a later turn's begins with."""
        return self.prompt if self.turn is None else self.prompt[: self.turn.first]

    @property
    def number(self) -> int:
        """Of its turn."""
        return 0 if self.turn is None else self.turn.number

    @property
    def response(self) -> Response:
        """What it has emitted so far."""
        spans = tuple((start, version) for start, version in self.spans if start < len(self.output))
        version, several = (spans[0][1] if spans else self.version), spans if len(spans) > 1 else ()
        tokens = as_tokens(self.output)
        return Response(tokens, version, stream=self.stream, origin=self.origin, spans=several, turn=self.number)

    def tail(self, most: int) -> list[int]:
        """The last `most` tokens of prompt and output, or all where there are fewer."""
        if (missing := most - len(self.output)) > 0:
            return [*self.prompt[-missing:].tolist(), *self.output]
        return self.output[-most:]

    def room(self, most: int) -> int:
        """Tokens that may be drafted, of `most`; not above 0 where there are none."""
        # The last token of a request is sampled by the target itself, so one draft less than what is left.
        room = min(most, self.max_tokens - len(self.output) - 1)
        if (early := self.min_output - len(self.output)) > 0:
            # vLLM decides by the first row of a step whether the one after all drafts may stop
            # (vllm/v1/sample/logits_processor/builtin.py, `MinTokensLogitsProcessor`).
            room = min(room, early - 1)
        return room

    def _cut(self, tokens: Sequence[int]) -> Sequence[int]:
        room = self.max_tokens - len(self.output)
        if not self.stop_ids.isdisjoint(tokens):
            room = min(room, 1 + next(i for i, token in enumerate(tokens) if token in self.stop_ids))
        return tokens if len(tokens) <= room else tokens[:room]


def still_thinks(tokens: Sequence[int], around: tuple[int, int], before: bool) -> bool:
    """Whether what follows `tokens` is thinking, which the two tokens `around` begin and end."""
    if around[0] in tokens or around[1] in tokens:
        return next(token for token in reversed(tokens) if token in around) == around[0]
    return before


@dataclass(slots=True)
class Step:
    """One decode step between `prepare` and `complete`."""

    size: int = 0  # rows of the engine's batch
    running: list[Request] = field(default_factory=list)  # that emitted something
    asked: list[Request] = field(default_factory=list)  # of these, those that a draft was looked for
    plan: Plan = field(default_factory=lambda: Plan(0, 0, 0, 0, 0))
    context_tokens: float = 0.0  # that the batch attends to

    @property
    def uses_memory(self) -> bool:
        """Whether proposals without a pass count; they do where the plan has no drafter, for comparison."""
        drafters = self.plan.drafters
        return not drafters or any(d not in MODEL_DRAFTERS for d in drafters)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the engine did in a step."""

    req_ids: Sequence[str]  # the batch, in the engine's order
    sampled: list[list[int]]  # tokens that each request emitted, none in its prompt
    verified: dict[str, list[int]]  # the drafts that the step verified, by request
    tokens: int  # that it computed
    context_tokens: float  # of the batch
    began: float | None  # by the clock; None: while the step before still ran, so its time is not its own
