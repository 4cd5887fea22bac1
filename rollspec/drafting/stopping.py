"""Where the draft of one request ends: the rules of `proposal.budget.rule` that look at one request at a time.

    @register_rule("short")
    class Short(StopRule):
        def keep(self, r, p, batch): return min(2, len(p.expected))

Drafts are one-hot or coupled with the target's noise, so any rule is lossless, also one that looks at the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from rollspec.drafting.requests import Proposal, Request
from rollspec.tuning.strategies import make
from rollspec.tuning.strategy import Arm, Outcome, Strategy, Vector
from rollspec.tuning.tuner import MODEL_DRAFTERS

SVIP_BOUND = 0.7
"""Of SVIP, in sqrt(nats): a choice between two tokens is unsure where the likelier has less than about 0.8."""

SPECDEC_RISK = 0.7  # of SpecDec++: the chance that any token of a draft is rejected, beyond which it is not continued

THRESHOLD = 0.4
"""Of acceptance, below which the draft ends: the default of `assistant_confidence_threshold` in transformers, which
names DISCO as its source.
"""

RATE = 0.1  # step size of AdaGrad, before it falls with what was learned

FEATURES = ("bias", "calibrated", "position", "drafter", "match", "head", "batch")

RULES: dict[str, type[StopRule]] = {}


class StopRule:
    """One rule of one engine. One thread. `lengths`: the draft lengths of the tuner's arms, ascending."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = [k for k in lengths if k]

    def keep(self, r: Request, p: Proposal, batch: int) -> int:
        """Tokens of the proposal to keep, at most `len(p.expected)`. `batch`: running requests."""
        return len(p.expected)

    def learn(self, r: Request, p: Proposal, accepted: int, known: int, verified: int, batch: int) -> None:
        """What became of a proposal, as `keep` was given it.

        `accepted`: its leading tokens that the target emitted, verified or not. `known`: of its positions: these, and
        one more where a token was wrong. `verified`: tokens of it that the engine verified, of which `r.accepted` were
        accepted; 0 where it was not handed over.
        """

    def finish(self, r: Request) -> None:
        """The request ended or was aborted."""


T = TypeVar("T", bound=type[StopRule])


def register_rule(name: str) -> Callable[[T], T]:
    """Make a rule known as `proposal.budget.rule: <name>`."""

    def register(cls: T) -> T:
        RULES[name] = cls
        return cls

    return register


@register_rule("svip")
class Svip(StopRule):
    """SVIP (arXiv:2411.18462): while √H of the drafter's next-token distribution is below `SVIP_BOUND`.

    A corpus knows the frequency f of its choice only, so H is that of {f, 1 - f}: the least it can be.
    """

    def keep(self, r: Request, p: Proposal, batch: int) -> int:  # noqa: D102
        for n, f in enumerate(np.clip(_each(p.draft.probs[: len(p.expected)]), 0.0, 1.0).tolist()):
            entropy = -sum(x * math.log(x) for x in (f, 1.0 - f) if x > 0)
            if f < 0.5:  # an unlikely choice is unsure, however little its complement says
                entropy = max(entropy, math.log(2.0))
            if math.sqrt(entropy) > SVIP_BOUND:
                return n
        return len(p.expected)


@register_rule("specdec++")
class SpecDec(StopRule):
    """SpecDec++ (arXiv:2405.19715, §3): while the chance that any token is rejected, 1 - Π p, is at most
    `SPECDEC_RISK`. Its trained acceptance head is the calibration here.
    """

    def keep(self, r: Request, p: Proposal, batch: int) -> int:  # noqa: D102
        return next((n for n, kept in enumerate(p.expected) if 1.0 - kept > SPECDEC_RISK), len(p.expected))


@register_rule("eesd")
class Eesd(StopRule):
    """Thompson sampling token by token, EESD (Liu et al., Findings of ACL 2024, arXiv:2406.03853), its Beta-TS.

    After each draft token

        θ ~ Beta(α, β),  Q ~ Bernoulli(θ)

    and the draft continues while Q = 1, so it has one token at least. Verification adds the accepted tokens to α and
    the rejected one, if any, to β; both begin at 1. One posterior for each drafter.
    Simplified: read from summaries of the paper, so the two draws and the update are as we understand them. Tokens
    behind the first rejected one count neither way. The draft exists already and is cut, of any drafter.
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

    Its reward is the paper's: the tokens that a verification emits, in [1, L + 1]. Simplified: arms are lengths only;
    where a drafter proposes less than the arm asks for, the arm is paid for what there was.
    """

    strategy: str

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(lengths)
        self._arms = [Arm(("draft",), k) for k in self.lengths]
        self.learners: dict[str, tuple[Strategy, int]] = {}  # by request: its bandit and the arm in play
        self._begun = 0

    def keep(self, r: Request, p: Proposal, batch: int) -> int:  # noqa: D102
        if not p.expected or not self._arms:
            return 0
        known = self.learners.get(r.req_id)
        if known is None:
            self._begun += 1
            known = make(self.strategy, self._arms, {"reward": "length"}, self._begun), 0
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

    strategy = "ucbspec"


@register_rule("exp3spec")
class EXP3SpecPerPrompt(PerPrompt):
    """EXP3Spec, Algorithm 5 of BanditSpec (`tuning/bandits.py`), for each prompt."""

    strategy = "exp3spec"


@register_rule("disco")
class Disco(StopRule):
    """DISCO (Mamou et al., arXiv:2405.04304) with features that are at hand; AdaEAGLE (arXiv:2412.18910) has its aim.

    For the i-th draft token, given that those before it are accepted,

        p_i = σ(w · x_i),  x_i = (1, logit c_i, log2 i, logit q_i, log2 match, head or not, log2 batch)

    with c_i the calibrated chance of acceptance and q_i the drafter's own; the draft ends before the first p_i below
    `THRESHOLD`. w starts at p_i = c_i and follows the gradient of the log loss on every known token, verified or not.
    Simplified: of both papers abstract and summaries were read, so features and threshold are ours, and it learns
    online. w is not kept with the job.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(lengths)
        self.weights: Vector = np.array([name == "calibrated" for name in FEATURES], float)
        self._squares: Vector = np.zeros(len(FEATURES))

    def keep(self, r: Request, p: Proposal, batch: int) -> int:  # noqa: D102
        if not p.expected:
            return 0
        unsure = _sigmoid(features(p, batch) @ self.weights) < THRESHOLD
        return int(unsure.argmax()) if unsure.any() else len(p.expected)

    def learn(self, r: Request, p: Proposal, accepted: int, known: int, verified: int, batch: int) -> None:  # noqa: D102
        if not known:
            return
        x = features(p, batch)[:known]
        gradient = x.T @ (_sigmoid(x @ self.weights) - (np.arange(len(x)) < accepted))
        self._squares += gradient**2
        self.weights -= RATE * gradient / np.sqrt(self._squares + 1e-6)


def features(p: Proposal, batch: int) -> Vector:
    """x of each token of a proposal. Shape [tokens, features]."""
    n = len(p.expected)
    position = np.arange(1.0, n + 1.0)
    ones = np.ones(n)
    columns = (
        ones,
        _logit(_each(p.expected)),
        np.log2(position),
        _logit(_each(p.draft.probs[:n])),
        np.log2(p.draft.match_len + position),
        ones * (p.draft.source in MODEL_DRAFTERS),
        ones * np.log2(max(batch, 1)),
    )
    return np.stack(columns, axis=1)


def _each(cumulative: Sequence[float]) -> Vector:
    """Probability of each token given those before it, from cumulative ones."""
    p = np.array(cumulative, float)
    before = np.concatenate([[1.0], p[:-1]])
    out: Vector = np.divide(p, before, out=np.zeros_like(p), where=before > 0)
    return out


def _logit(p: Vector) -> Vector:
    p = np.clip(p, 0.01, 0.99)
    return np.log(p / (1.0 - p))


def _sigmoid(z: Vector) -> Vector:
    return 1.0 / (1.0 + np.exp(-np.clip(z, -30.0, 30.0)))
