"""Replay: the previous response to the same prompt under the same noise, drafted at the same position while it holds.

Under kept noise (`reuse.mode: coupled`) a sample repeats its response of the epoch before until the new policy chooses
another token; most tokens are the same. After the first difference the texts may agree again further along, which the
suffix drafter finds in past responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollspec.proposal.base import Draft


@dataclass(slots=True)
class Replay:
    """One request's old response. `at`: leading tokens repeated so far. `alive`: nothing has differed yet."""

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
