"""Hierarchy Drafting (arXiv:2502.05609): three databases of phrases, asked in the order of their temporal locality.

    1. context:     this request's prompt and response; what followed the last two tokens the last time
    2. model:       phrases that the model often emits, from finished responses to any prompt
    3. statistics:  phrases of text in general

The first one that knows the last tokens drafts a phrase of at most four. The released code keys context and model by
the last token, verifies seven phrases in parallel and builds the model's database beforehand. Here two tokens are the
key of one chain, finished responses are counted as the engine runs, and prompts stand in for its corpus of dialogues.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollspec.config import RollspecConfig
from rollspec.drafting.base import Draft, Drafter, register_drafter
from rollspec.drafting.requests import Request
from rollspec.proposal.history import History
from rollspec.proposal.ngrams import Ngrams, likeliest

PHRASE = 4  # tokens of a draft, at most: the released code keeps phrases of five, the key's token included
KEY = 2  # tokens that a phrase is looked up by
MOST_ROWS = 100_000  # of each of the databases that outlive a request
REPEAT = 0.8  # chance that a token of the context's phrase is accepted, before it is calibrated
KEYS = 4096  # prompts whose text is known to be counted already


@dataclass(slots=True)
class Context:
    """A request's own database. `positions`: where in `text` what followed two tokens stands, the last time."""

    text: list[int] = field(default_factory=list)
    positions: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        text, positions = self.text, self.positions
        for token in tokens:
            if len(text) >= KEY:
                positions[text[-2], text[-1]] = len(text)
            text.append(token)

    def phrase(self, room: int) -> list[int]:
        """What followed the last occurrence of the last two tokens; where that is the text's end, it repeats."""
        text = self.text
        at = self.positions.get((text[-2], text[-1])) if len(text) >= KEY else None
        return [] if at is None else [text[at + i % (len(text) - at)] for i in range(room)]


@register_drafter("hierarchy")
class HierarchyDrafting(Drafter):
    """Keeps the databases. Sources are calibrated apart: `hierarchy-context`, `-model` and `-statistics`."""

    def __init__(self, name: str, config: RollspecConfig, history: History) -> None:
        self.name = name
        self.contexts: dict[str, Context] = {}
        self.lower = {"model": Ngrams(KEY), "statistics": Ngrams(1, KEY)}
        self._known: dict[str, None] = {}

    def begin(self, r: Request) -> None:
        """Fill the context's database with the prompt, and the statistics with one that is new."""
        prompt = r.prompt.tolist()
        context = self.contexts[r.req_id] = Context()
        context.add(prompt)
        context.add(r.output)
        if not r.private and r.key not in self._known:
            if len(self._known) >= KEYS:
                self._known.clear()
            self._known[r.key] = None
            self._count("statistics", prompt)

    def observe(self, r: Request) -> None:
        """Append what was emitted to the context."""
        self.contexts[r.req_id].add(r.emitted)

    def propose(self, r: Request, room: int) -> Draft | None:
        """A phrase of the first database that has one."""
        room = min(room, PHRASE)
        if tokens := self.contexts[r.req_id].phrase(room):
            return Draft(tokens, [REPEAT**i for i in range(1, room + 1)], f"{self.name}-context", KEY)
        tail = r.tail(KEY)
        for level, table in self.lower.items():
            tokens, probs, matched = table.follow(tail, room, likeliest)
            if tokens:
                return Draft(tokens, probs, f"{self.name}-{level}", matched)
        return None

    def finish(self, r: Request) -> None:
        """Count the response for the model's database; nothing of a private one is kept."""
        del self.contexts[r.req_id]
        if not r.private:
            self._count("model", r.output)

    def _count(self, level: str, text: list[int]) -> None:
        table = self.lower[level]
        table.add(text, len(text))
        table.shrink(MOST_ROWS)
