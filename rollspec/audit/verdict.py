"""The verdict of an audit, from what each of its checks found; no engine.

evidence = Evidence(samples, vocab, np.random.default_rng(0))
for s in range(len(samples.tokens)):
evidence.add(s, log_probs_of_the_target)        # [tokens of s, V]
result = conclude(distribution_tests(evidence), samples.n_tokens)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from rollspec.audit.evidence import Evidence, Samples
from rollspec.audit.noise import NoiseCheck
from rollspec.audit.power import Power
from rollspec.audit.statistics import Ints, TestResult

Verdict = Literal["pass", "fail", "inconclusive"]

ALPHA = 1e-3

# What float32 engines and the float32 reference may differ by, against what a half-precision engine differs by anyway.
TIE = {"float32": 1e-4}
TIE_HALF = 0.5
MAX_LOG_PROB_ERROR = {"float32": 1e-2}
MEAN_LOG_PROB_ERROR = {"float32": 1e-3}
MEAN_LOG_PROB_ERROR_HALF = 0.1


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Draft tokens of one part of the audit."""

    drafted: int
    accepted: int

    @property
    def rejected(self) -> int:
        """Drafted and not accepted."""
        return self.drafted - self.accepted


@dataclass(frozen=True, slots=True)
class LogProbCheck:
    """The engine's reported log-probabilities against the reference's, over `n` sampled tokens."""

    n: int
    not_finite: int
    max_error: float
    mean_error: float
    max_allowed: float | None
    mean_allowed: float

    @property
    def passed(self) -> bool:
        """Finite, and as close as the engine's precision allows."""
        return (
            self.not_finite == 0
            and self.mean_error <= self.mean_allowed
            and (self.max_allowed is None or self.max_error <= self.max_allowed)
        )


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Where two greedy responses differ first: `gap` is the distance of the reference's logits of the two tokens there;
    None, as the tokens, where one response ended and the other continued.
    """

    sequence: int
    prompt: int
    position: int
    reference_token: int | None
    subject_token: int | None
    gap: float | None


@dataclass(frozen=True, slots=True)
class GreedyCheck:
    """Greedy responses with drafts against those without. A sequence is compared up to its first difference."""

    sequences: int
    tokens: int
    identical: int
    ties: int
    mismatches: tuple[Mismatch, ...]
    drafts: DraftCounts | None = None

    @property
    def passed(self) -> bool:
        """No difference that is not a tie in the reference's logits."""
        return not self.mismatches


@dataclass(frozen=True, slots=True)
class AuditResult:
    """The whole audit. `reasons` are sentences; empty for a pass. `tests` are sorted by p-value. `lossy`: the bias of
    the rule by which rollouts start from old responses; None where they do not.
    """

    verdict: Verdict
    reasons: tuple[str, ...]
    alpha: float
    n_tokens: int
    tests: tuple[TestResult, ...]
    log_probs: LogProbCheck | None
    greedy: GreedyCheck | None
    noise: NoiseCheck | None
    drafts: DraftCounts | None
    provenance: dict[str, Any]
    lossy: float | None = None
    power: Power | None = None

    @property
    def finding(self) -> str:
        """The headline: the gravest finding. A sentence about the tokens rests on tests of the tokens."""
        if self.verdict == "pass":
            return "PASS: the sampled tokens follow the target's distribution"
        if self.verdict == "inconclusive":
            return "INCONCLUSIVE: this audit shows nothing"
        if any(t.p_adjusted <= self.alpha for t in self.tests) or (self.noise is not None and not self.noise.passed):
            return "FAIL: the engine does not sample from the target"
        if self.lossy is not None:
            return "FAIL: rollouts are lossy by their configuration; no test rejects the engine's own tokens"
        if self.greedy is not None and not self.greedy.passed:
            return "FAIL: greedy responses change with drafts; no test rejects the sampled tokens"
        return "FAIL: the engine reports log-probabilities that are not the target's; no test rejects its tokens"

    @property
    def subject(self) -> str | None:
        """What was audited, the mode and how draft lengths were chosen; None where it was not recorded."""
        arm = self.provenance.get("subject")
        if not arm:
            return None
        own = arm.get("rollspec")
        return f"{arm['name']}, draft lengths by {own['tuning']['policy']}" if own else str(arm["name"])

    @property
    def min_p(self) -> float:
        """The smallest p-value before adjustment."""
        return min((t.p_value for t in self.tests), default=1.0)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able mapping of everything above."""
        out = asdict(self)
        out |= {"finding": self.finding, "min_p": self.min_p, "n_tests": len(self.tests)}
        for name in ("log_probs", "greedy"):
            check = getattr(self, name)
            if check is not None:
                out[name]["passed"] = check.passed
        if self.drafts is not None:
            out["drafts"]["rejected"] = self.drafts.rejected
        return out


def check_log_probs(evidence: Evidence, dtype: str = "float32") -> LogProbCheck | None:
    """Compare what the engine reported with the reference; None where it reported nothing."""
    if evidence.samples.log_probs is None:
        return None
    reported = np.concatenate([*evidence.samples.log_probs, np.zeros(0)])
    finite = np.isfinite(reported)
    error = np.abs(reported[finite] - evidence.log_prob[finite])
    return LogProbCheck(
        n=len(reported),
        not_finite=int((~finite).sum()),
        max_error=float(error.max(initial=0.0)),
        mean_error=float(error.mean()) if len(error) else 0.0,
        max_allowed=MAX_LOG_PROB_ERROR.get(dtype),
        mean_allowed=MEAN_LOG_PROB_ERROR.get(dtype, MEAN_LOG_PROB_ERROR_HALF),
    )


def check_greedy(
    reference: Sequence[Ints],
    subject: Samples,
    gap: Callable[[int, list[int], int, int], float],
    dtype: str = "float32",
    drafts: DraftCounts | None = None,
) -> GreedyCheck:
    """Compare greedy responses token by token.

    Args:
        reference: [prompt] responses of the engine without drafts.
        subject: responses of the engine with drafts, any number per prompt.
        gap: (prompt, prefix tokens, token a, token b) -> how much larger a's logit is in the reference model, a and b
            being the two engines' tokens. Called only where they part.
        dtype: the engines' precision; it decides what counts as a tie.
        drafts: what was drafted in `subject`, for the record.
    """
    identical, ties, compared = 0, 0, 0
    mismatches: list[Mismatch] = []
    for s, (prompt, tokens) in enumerate(zip(subject.prompt.tolist(), subject.tokens, strict=True)):
        want = reference[prompt]
        n = min(len(want), len(tokens))
        differ = np.flatnonzero(want[:n] != tokens[:n])
        if not len(differ) and len(want) == len(tokens):
            identical += 1
            compared += n
            continue
        at = int(differ[0]) if len(differ) else n
        compared += at
        if at == n:  # one ended where the other continued: no tie can do that
            mismatches.append(Mismatch(s, prompt, at, None, None, None))
            continue
        a, b = int(want[at]), int(tokens[at])
        distance = abs(gap(prompt, want[:at].tolist(), a, b))
        if distance <= TIE.get(dtype, TIE_HALF):
            ties += 1
        else:
            mismatches.append(Mismatch(s, prompt, at, a, b, distance))
    return GreedyCheck(len(subject.tokens), compared, identical, ties, tuple(mismatches), drafts)


def conclude(
    tests: Sequence[TestResult],
    n_tokens: int,
    *,
    alpha: float = ALPHA,
    log_probs: LogProbCheck | None = None,
    greedy: GreedyCheck | None = None,
    noise: NoiseCheck | None = None,
    drafts: DraftCounts | None = None,
    lossy: float | None = None,
    power: Power | None = None,
    provenance: dict[str, Any] | None = None,
) -> AuditResult:
    """The verdict. A failed test is a failure whatever else is missing; a pass needs drafts of both fates.

    Args:
        tests: Holm-adjusted results of `distribution_tests`.
        noise: of an engine that samples in `mode: coupled`.
        drafts: draft counts of an engine that should have drafted; None for one without speculation.
        lossy: bias of the rule where rollouts start from old responses: a failure whatever the tests say.
        power: what so many tokens of this distribution can show.
    """
    failures: list[str] = []
    if lossy is not None:
        failures.append(
            f"rollouts start from old responses (reuse.mode = lenient, bias {lossy:g}), so their distribution is not "
            "the policy's; `python -m benchmarks.reuse` measures how far it is."
        )
    rejected = [t for t in tests if t.p_adjusted <= alpha]
    if rejected:
        t = rejected[0]
        failures.append(
            f"{len(rejected)} of {len(tests)} tests reject the target's distribution; the strongest is {t.name} "
            f"({t.where}) with p = {t.p_value:.1e}, adjusted {t.p_adjusted:.1e}."
        )
    failures += _log_probs_failure(log_probs)
    if greedy is not None and not greedy.passed:
        m = greedy.mismatches[0]
        how = (
            "one response ends there"
            if m.gap is None
            else (f"{m.reference_token} without drafts, {m.subject_token} with; their logits differ by {m.gap:.3g}")
        )
        failures.append(
            f"{len(greedy.mismatches)} of {greedy.sequences} greedy responses change with drafts, the first "
            f"at position {m.position} of prompt {m.prompt} ({how})."
        )
    failures += _noise_failure(noise)
    missing: list[str] = []
    if not tests:
        missing.append(f"{n_tokens} sampled tokens are too few for any test; ask for more.")
    if drafts is not None:
        if drafts.drafted == 0:
            missing.append("nothing was drafted, so speculation was not tested; use more rounds or longer responses.")
        elif drafts.accepted == 0:
            missing.append(f"none of {drafts.drafted} drafted tokens was accepted, so acceptance was not tested.")
        elif drafts.rejected == 0:
            missing.append(f"all {drafts.drafted} drafted tokens were accepted, so rejection was not tested.")
    verdict: Verdict = "fail" if failures else "inconclusive" if missing else "pass"
    return AuditResult(
        verdict,
        (*failures, *missing),
        alpha,
        n_tokens,
        tuple(tests),
        log_probs,
        greedy,
        noise,
        drafts,
        dict(provenance or {}),
        lossy,
        power,
    )


def _log_probs_failure(check: LogProbCheck | None) -> list[str]:
    if check is None or check.passed:
        return []
    if check.not_finite:
        return [f"{check.not_finite} of {check.n} log-probabilities that the engine reported are NaN or infinite."]
    return [
        f"the engine's log-probabilities are off the reference by {check.mean_error:.2g} on average and "
        f"{check.max_error:.2g} at most."
    ]


def _noise_failure(check: NoiseCheck | None) -> list[str]:
    if check is None or check.first is None:
        return []
    _, position, best, token, distance = check.first
    return [
        f"{check.wrong} of {check.tokens} tokens are not the ones that the target and their noise make; the "
        f"first is token {position} of a response: {token} where {best} wins by {distance:.3g}."
    ]
