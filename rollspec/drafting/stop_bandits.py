"""Stop rules that are bandits: EESD's decides after each draft token, BanditSpec's has a learner for each prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollspec.drafting.requests import Proposal, Request
from rollspec.drafting.stopping import StopRule, register_rule
from rollspec.tuning.policies import make
from rollspec.tuning.policy import Arm, Outcome, Policy


@register_rule("eesd")
class Eesd(StopRule):
    """Thompson sampling token by token, EESD (Liu et al., Findings of ACL 2024, arXiv:2406.03853), its Beta-TS.

    After each draft token

        θ ~ Beta(α, β),  Q ~ Bernoulli(θ)

    and the draft continues while Q = 1, so it has one token at least. Verification adds the accepted tokens to α and
    the rejected one, if any, to β; both begin at 1. One posterior for each drafter.
    Simplified: read from summaries of the paper, not its text, which name the control, Beta-TS and Calibration-TS; the
    two draws and the update are as we understand them, and Calibration-TS, not described there, is left out. Tokens
    behind the first rejected one count neither way. The draft exists already and is cut, where EESD's early exit would
    not have computed the rest; any drafter, not an early exit of the target.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(lengths)
        self.posteriors: dict[str, list[float]] = {}  # by drafter: α and β
        self._rng = np.random.default_rng(0)

    def keep(self, r: Request, p: Proposal, batch: int) -> int:  # noqa: D102
        most = len(p.expected)
        if most <= 1:
            return most
        alpha, beta = self.posteriors.get(p.draft.source, (1.0, 1.0))
        stops = self._rng.random(most - 1) >= self._rng.beta(alpha, beta, most - 1)
        return 1 + int(stops.argmax()) if stops.any() else most

    def learn(self, r: Request, p: Proposal, accepted: int, known: int, verified: int, batch: int) -> None:  # noqa: D102
        if verified:
            posterior = self.posteriors.setdefault(p.draft.source, [1.0, 1.0])
            posterior[0] += r.accepted
            posterior[1] += r.accepted < verified


class PerPrompt(StopRule):
    """BanditSpec (Hou et al., ICML 2025, arXiv:2505.15141): a bandit per prompt, which begins and stops with it.

    Its arms are draft lengths, its reward is the paper's: the tokens that a verification emits, in [1, L + 1]. Regret
    is up to the stopping time, the step in which the response ends, and nothing is carried to the next prompt.
    Simplified: arms are lengths only, not drafters; where a drafter proposes less than the arm asks for, the arm is
    paid for what there was, and a step without a draft teaches nothing.
    """

    policy: str

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(lengths)
        self._arms = [Arm(("draft",), k) for k in self.lengths]
        self.learners: dict[str, tuple[Policy, int]] = {}  # by request: its bandit and the arm in play
        self._begun = 0

    def keep(self, r: Request, p: Proposal, batch: int) -> int:  # noqa: D102
        if not p.expected or not self._arms:
            return 0
        known = self.learners.get(r.req_id)
        if known is None:
            self._begun += 1
            known = make(self.policy, self._arms, {"reward": "length"}, self._begun), 0
        arm = known[0].choose(0)
        self.learners[r.req_id] = known[0], arm
        return min(self.lengths[arm], len(p.expected))

    def learn(self, r: Request, p: Proposal, accepted: int, known: int, verified: int, batch: int) -> None:  # noqa: D102
        if verified and r.req_id in self.learners:
            learner, arm = self.learners[r.req_id]
            each = np.ones(len(self._arms))
            learner.observe(0, Outcome(arm, 1, (1.0 + r.accepted) * each, each))

    def finish(self, r: Request) -> None:  # noqa: D102
        self.learners.pop(r.req_id, None)


@register_rule("ucbspec")
class UCBSpecPerPrompt(PerPrompt):
    """UCBSpec, Algorithm 4 of BanditSpec (`tuning/bandits.py`), for each prompt."""

    policy = "ucbspec"


@register_rule("exp3spec")
class EXP3SpecPerPrompt(PerPrompt):
    """EXP3Spec, Algorithm 5 of BanditSpec (`tuning/bandits.py`), for each prompt."""

    policy = "exp3spec"
