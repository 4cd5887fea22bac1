"""Base of drafters that learn n-grams from a request and its siblings: one table per prompt and policy version."""

from __future__ import annotations

from typing import ClassVar

from rollspec.config import RollspecConfig
from rollspec.drafting.base import Drafter
from rollspec.drafting.requests import Request
from rollspec.proposal.history import History
from rollspec.proposal.ngrams import ROW_BYTES, PromptTable, PromptTables
from rollspec.proposal.suffix import CORPUS_BYTES

VOTERS = 64
"""Siblings that are counted apart; with more than 64 of one prompt, every 64th shares a count."""


class SiblingNgrams(Drafter):
    """Keeps the tables; what is proposed from them is a subclass's."""

    lengths: ClassVar[tuple[int, ...]]
    """Of the contexts, in tokens."""
    votes: ClassVar[bool] = False
    """Whether a row holds which siblings emitted a follower, instead of how often it was emitted."""

    def __init__(self, name: str, config: RollspecConfig, history: History) -> None:
        self.name = name
        self.tables = PromptTables(CORPUS_BYTES * history.max_bytes // ROW_BYTES, *self.lengths)
        self.running: dict[str, tuple[PromptTable, int]] = {}
        """Request -> the table that it shares, and its number in there."""

    def begin(self, r: Request) -> None:
        """Join the prompt's table, with the tokens that the request starts from."""
        table = self.tables.open(r.key, r.version)
        self.running[r.req_id] = table, table.joined
        self._add(r, len(r.output) - (r.known if table.joined > 1 else 0))

    def observe(self, r: Request) -> None:
        """Add what was emitted."""
        self._add(r, len(r.emitted))

    def finish(self, r: Request) -> None:
        """Leave the table."""
        self.tables.close(self.running.pop(r.req_id)[0], r.private)

    def _add(self, r: Request, new: int) -> None:
        table, number = self.running[r.req_id]
        # The prompt is a context, and no follower: the target did not say it.
        voter = 1 << number % VOTERS if self.votes else 0
        table.ngrams.add(r.tail(max(self.lengths) + new), new, voter)
