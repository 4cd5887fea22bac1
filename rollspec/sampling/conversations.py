"""Rollouts whose prompts grow by a turn, as a trainer's side sees them: which request goes on with which, and its mark.

conversation = Conversation.begin(prompt)
params.extra_args = {"rollspec": {"turn": conversation.mark()}}     # `scoring.turn` reads it in the engine
conversation.answered(prompt, response)
if conversation.goes_on(next_prompt): ...                           # its next turn
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollspec.proposal.base import prompt_key


@dataclass(slots=True)
class Conversation:
    """One rollout. `first`: tokens of its first prompt; `said`: of all up to the end of its latest turn."""

    name: str
    first: int
    said: int
    key: str = ""  # of what was said but the last token, which some chat templates let the next message replace
    turn: int = 0

    @classmethod
    def begin(cls, prompt: Sequence[int]) -> Conversation:
        """A new one."""
        return cls(uuid.uuid4().hex, len(prompt), len(prompt))

    def goes_on(self, prompt: Sequence[int]) -> bool:
        """Whether `prompt` is this conversation, with what the environment said to it; then the next turn begins."""
        on = len(prompt) > self.said and prompt_key(prompt[: self.said - 1]) == self.key
        self.turn += on
        return on

    def answered(self, prompt: Sequence[int], response: Sequence[int]) -> None:
        """A turn has ended."""
        said = [*prompt, *response]
        self.said, self.key = len(said), prompt_key(said[:-1])

    def mark(self) -> list[Any]:
        """The present turn: name, number, first, since (`rollspec.proposal.base.Turn`)."""
        return [self.name, self.turn, self.first, self.said]
