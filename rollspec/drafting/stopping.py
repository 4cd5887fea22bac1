"""Where the draft of one request ends: the rules of `proposal.budget.policy` that look at one request at a time.

    @register_rule("short")
    class Short(StopRule):
        def keep(self, r, p, batch): return min(2, len(p.expected))

A rule decides how many tokens of every proposal are kept, before the arm's own limit, and learns how many were
accepted. Drafts are one-hot or coupled with the target's noise, so any rule is lossless, also one that looks at the
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from rollspec.drafting.requests import Proposal, Request
from rollspec.proposal import budget

RULES: dict[str, type[StopRule]] = {}


class StopRule:
    """One rule of one engine. One thread. `lengths`: the draft lengths of the tuner's arms, ascending."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = [k for k in lengths if k]

    def keep(self, r: Request, p: Proposal, batch: int) -> int:
        """Tokens of the proposal to keep, at most `len(p.expected)`.

        Args:
            r: whose draft it is.
            p: the draft with its calibrated acceptance.
            batch: running requests.
        """
        return len(p.expected)

    def learn(self, r: Request, p: Proposal, accepted: int, known: int, verified: int, batch: int) -> None:
        """What became of a proposal.

        Args:
            r: `r.accepted` tokens of what was verified were accepted.
            p: as `keep` was given it.
            accepted: its leading tokens that the target emitted, verified or not.
            known: of its positions: `accepted`, and one more where a token was wrong.
            verified: tokens of it that the engine verified; 0 where it was not handed over.
            batch: requests that went through the step.
        """

    def finish(self, r: Request) -> None:
        """The request ended or was aborted."""


T = TypeVar("T", bound=type[StopRule])


def register_rule(name: str) -> Callable[[T], T]:
    """Make a rule known as `proposal.budget.policy: <name>`."""

    def register(cls: T) -> T:
        RULES[name] = cls
        return cls

    return register


@register_rule("svip")
class Svip(StopRule):
    """SVIP (arXiv:2411.18462): while the drafter is sure, by the entropy of its own distribution."""

    def keep(self, r: Request, p: Proposal, batch: int) -> int:  # noqa: D102
        return min(budget.svip_cut(p.draft.probs), len(p.expected))


@register_rule("specdec++")
class SpecDec(StopRule):
    """SpecDec++ (arXiv:2405.19715): while the chance that any token is rejected is small. Its trained acceptance head
    is the calibration here.
    """

    def keep(self, r: Request, p: Proposal, batch: int) -> int:  # noqa: D102
        return budget.specdec_cut(p.expected)
