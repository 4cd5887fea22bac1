"""The drafters that remember responses: suffix drafts from siblings and past epochs, and replay under kept noise."""

from __future__ import annotations

from collections.abc import Sequence

from rollspec.config import RollspecConfig
from rollspec.drafting.base import Draft, Drafter, register_drafter
from rollspec.drafting.requests import Replay, Request
from rollspec.proposal.base import as_tokens
from rollspec.proposal.history import History
from rollspec.proposal.lookup import DEPTH, NOTHING
from rollspec.proposal.suffix import SuffixDrafter
from rollspec.tuning.tuner import LEARNED


@register_drafter("replay")
class ReplayMemory(Drafter):
    """Proposes the response that a request gave an epoch ago under the same noise, while it repeats it."""

    def __init__(self, name: str, config: RollspecConfig, history: History) -> None:
        self.history = history

    def begin(self, r: Request) -> None:
        """Find the old response, if the request's noise is kept."""
        if r.stream is None or r.private:
            return
        old = self.history.previous(r.key, r.stream, r.version, r.origin)
        if old is None:
            return
        tokens = old.tolist()
        part = self.history.part(r.key, r.origin)
        if part is not None:  # it was aborted, and this part of it is counted; at least as long as what came back
            r.memory.replay = Replay(tokens)
            r.memory.replay.advance(part.tokens.tolist())
            r.memory.counted = r.memory.reused(len(part.tokens))
        r.memory.replay = Replay(tokens)
        r.memory.replay.advance(r.output)

    def observe(self, r: Request) -> None:
        """Follow the old response."""
        if r.memory.replay is not None:
            r.memory.replay.advance(r.emitted)

    def propose(self, r: Request, room: int) -> Draft | None:
        """What follows in the old response."""
        return r.memory.replay.draft(room) if r.memory.replay is not None else None


@register_drafter("suffix")
class SuffixMemory(Drafter):
    """Proposes what followed the same tokens in responses of the prompt's group, or of any prompt."""

    def __init__(self, name: str, config: RollspecConfig, history: History) -> None:
        suffix = config.proposal.suffix
        free = [d for d in config.proposal.drafters if d not in LEARNED]
        if free and name not in free:  # others draft, and only they: prompts' lengths are kept here, and no text
            suffix = suffix.model_copy(update={"sources": ()})
        self.corpora = SuffixDrafter(suffix, history)

    def begin(self, r: Request) -> None:
        """Open a sequence in the corpus of the prompt group, or go on with the one of its origin."""
        m = r.memory
        m.group, m.sequence = self.corpora.open(r.key, r.prompt, r.version, r.origin)
        m.ended = m.group.ended
        m.context = [*[NOTHING] * DEPTH, *r.prompt[-DEPTH:].tolist(), *r.output][-DEPTH:]
        if r.output:
            self.corpora.extend([(m.group, m.sequence, r.output)])

    def observe(self, r: Request) -> None:
        """Move the context on."""
        context = r.memory.context
        context.extend(r.emitted)
        del context[:-DEPTH]

    def propose_all(self, asked: Sequence[Request], rooms: Sequence[int]) -> Sequence[Draft | None]:
        """The likeliest continuation of each one's context."""
        parts = [r.memory for r in asked]
        return self.corpora.draft([m.group for m in parts if m.group], [m.context for m in parts], rooms)

    def store_all(self, running: Sequence[Request], wait: bool) -> None:
        """Add what was emitted to the corpora; it waits while nothing is looked up, since adding in bulk costs less."""
        new = []
        for r in running:
            m = r.memory
            if wait:
                m.unstored.extend(r.emitted)
            elif m.group is not None:
                new.append((m.group, m.sequence, [*m.unstored, *r.emitted] if m.unstored else r.emitted))
                m.unstored.clear()
        self.corpora.extend(new)

    def finish(self, r: Request) -> None:
        """Keep the whole response, or nothing of a private request."""
        m = r.memory
        if m.group is None:
            return
        if r.private:
            self.corpora.forget(m.group)
            return
        if m.unstored:
            self.corpora.extend([(m.group, m.sequence, m.unstored)])
        aborted = None if r.ended else r.origin
        self.corpora.close(m.group, m.sequence, as_tokens(r.output), r.version, aborted)
