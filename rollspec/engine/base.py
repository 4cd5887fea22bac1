"""What a decode step needs of an inference engine: what it verified, passes of the draft head, and where drafts go.

    drafts = decode(engine, adapter)    # once per step of the inference engine

An adapter for an engine implements `EngineAdapter`. Where the engine splits its step over several calls, the adapter
calls `Engine.prepare` and `Engine.complete` from them itself; the order is that of `decode`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rollspec.step import Engine


@dataclass(frozen=True, slots=True)
class Verified:
    """What the inference engine's last step computed.

    Attributes:
        req_ids: the batch, in the engine's order.
        sampled: tokens each request emitted, accepted draft tokens and the target's own; empty in its prompt.
        scheduled: draft tokens that were verified, by request; the engine may have cut what was proposed.
        context_tokens: that the batch attends to.
        tokens: computed in the step.
        decode_only: no prompt was computed in it, so its duration is the cost of decoding.
        seconds: it took, without drafting.
    """

    req_ids: Sequence[str]
    sampled: Sequence[Sequence[int]]
    scheduled: Mapping[str, Sequence[int]]
    context_tokens: float
    tokens: int
    decode_only: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class HeadRun:
    """What passes of the draft head gave.

    Attributes:
        rows: proposed tokens per request of the batch, in its order.
        probs: the probability that the head gave each of them, given those before; None if not known.
        seconds: that the passes took.
        late: of these, to read context that the head had missed while it rested.
    """

    rows: Sequence[Sequence[int]]
    probs: Sequence[Sequence[float]] | None
    seconds: float
    late: float = 0.0


class EngineAdapter(Protocol):
    """One inference engine, as a decode step sees it. `Engine.begin` and `Engine.finish` announce requests."""

    def verified(self) -> Verified:
        """The step that just ended."""

    def run_head(self, passes: int) -> HeadRun | None:
        """Run the draft head `passes` times after that step; None where it cannot be run now."""

    def hand_over(self, drafts: list[list[int]]) -> None:
        """Have the engine verify `drafts` in its next step: any length from 0 to K per request, in batch order."""


def decode(engine: Engine, adapter: EngineAdapter) -> list[list[int]]:
    """One decode step: learn from what was verified, propose, and hand the drafts over, which are returned."""
    last = adapter.verified()
    engine.timed(last.tokens, last.decode_only, last.seconds, len(last.req_ids))
    passes = engine.prepare(last.req_ids, last.sampled, last.scheduled, last.context_tokens)
    run = adapter.run_head(passes) if passes else None
    if run is not None:
        engine.passed(passes, run.seconds, len(last.req_ids), run.late)
    drafts = engine.complete(run.rows, run.probs) if run is not None else engine.complete()
    adapter.hand_over(drafts)
    return drafts
