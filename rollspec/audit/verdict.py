"""The verdict of an audit, from what each of its checks found; no engine.

evidence = Evidence(samples, vocab, np.random.default_rng(0))
for s in range(len(samples.tokens)):
    evidence.add(s, log_probs_of_the_target)        # [tokens of s, V]
AuditResult(distribution_tests(evidence), samples.n_tokens).verdict
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from rollspec.audit.distribution import Power
from rollspec.audit.evidence import Evidence, Samples
from rollspec.audit.noise import NoiseCheck
from rollspec.audit.statistics import Floats, Ints, TestResult

Verdict = Literal["pass", "fail", "inconclusive"]

ALPHA = 1e-3

# What a float32 engine and the float32 reference may differ by, and what a half-precision engine differs by anyway.
TIE, TIE_HALF = 1e-4, 0.5
MAX_LOG_PROB_ERROR = 1e-2
MEAN_LOG_PROB_ERROR, MEAN_LOG_PROB_ERROR_HALF = 1e-3, 0.1


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
    def failure(self) -> str | None:
        """They are not finite, or further off than the engine's precision allows."""
        if self.not_finite:
            return f"{self.not_finite} of {self.n} log-probabilities that the engine reported are NaN or infinite."
        if self.mean_error <= self.mean_allowed and (self.max_allowed is None or self.max_error <= self.max_allowed):
            return None
        return f"the engine's log-probabilities are not the reference's: {self.distance}."

    @property
    def distance(self) -> str:
        """How far they are apart, in words."""
        broken = f", {self.not_finite:,} NaN or infinite" if self.not_finite else ""
        return f"off by {self.mean_error:.1e} on average, {self.max_error:.1e} at most{broken}"


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Where two greedy responses part: `gap` is the distance of the reference's logits of the two tokens there; None,
    as the tokens, where one response ended and the other continued.
    """

    prompt: int
    position: int
    reference_token: int | None = None
    subject_token: int | None = None
    gap: float | None = None


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
    def failure(self) -> str | None:
        """A difference that is not a tie in the reference's logits."""
        if not self.mismatches:
            return None
        m = self.mismatches[0]
        how = f"{m.reference_token} without drafts, {m.subject_token} with; their logits differ by {m.gap or 0:.3g}"
        return (
            f"{len(self.mismatches)} of {self.sequences} greedy responses change with drafts, the first at position "
            f"{m.position} of prompt {m.prompt} ({'one response ends there' if m.gap is None else how})."
        )


@dataclass(frozen=True, slots=True)
class AuditResult:
    """What every check of an audit found, and what follows from it.

    Attributes:
        tests: Holm-adjusted results of `distribution_tests`, sorted by p-value.
        noise: of an engine that samples in `mode: coupled`.
        drafts: draft counts of an engine that should have drafted; None for one without speculation.
        lossy: bias of the rule where rollouts start from old responses: a failure whatever the tests say.
        power: what so many tokens of this distribution can show.
        cross_check: of some of these tokens, which the engine without drafts read; decides what a failure means, only.
        notes: sentences that go with the reasons.
    """

    tests: Sequence[TestResult]
    n_tokens: int
    alpha: float = ALPHA
    log_probs: LogProbCheck | None = None
    greedy: GreedyCheck | None = None
    noise: NoiseCheck | None = None
    drafts: DraftCounts | None = None
    lossy: float | None = None
    power: Power | None = None
    cross_check: LogProbCheck | None = None
    notes: tuple[str, ...] = ()
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def failures(self) -> list[str]:
        """A sentence for each thing that is wrong."""
        found: list[str] = []
        if self.lossy is not None:
            found.append(
                f"rollouts start from old responses (reuse.mode = lenient, bias {self.lossy:g}), so their distribution "
                "is not the policy's; `python -m benchmarks.reuse` measures how far it is."
            )
        if rejected := [t for t in self.tests if t.p_adjusted <= self.alpha]:
            t = rejected[0]
            found.append(
                f"{len(rejected)} of {len(self.tests)} tests reject the target's distribution; the strongest is "
                f"{t.name} ({t.where}) with p = {t.p_value:.1e}, adjusted {t.p_adjusted:.1e}."
            )
        checks = (self.log_probs, self.greedy, self.noise)
        return found + [c.failure for c in checks if c is not None and c.failure]

    @property
    def missing(self) -> list[str]:
        """A sentence for each thing that was not tested."""
        found = [] if self.tests else [f"{self.n_tokens} sampled tokens are too few for any test; ask for more."]
        if (d := self.drafts) is not None and not (d.accepted and d.rejected):
            found.append(
                f"{d.drafted} tokens were drafted, {d.accepted} of them accepted and {d.rejected} rejected, and a test "
                "of speculation needs some of both; ask for more or longer responses."
            )
        return found

    @property
    def verdict(self) -> Verdict:
        """What failed is a failure whatever else is missing; a pass needs tests, and drafts of both fates."""
        return "fail" if self.failures else "inconclusive" if self.missing else "pass"

    @property
    def foreign(self) -> bool:
        """Whether engine and reference are not the same model: they differ as the engine samples and as it reads."""
        sampled = self.log_probs is None or self.log_probs.failure
        return bool(self.cross_check and self.cross_check.failure and sampled)

    @property
    def origin(self) -> list[str]:
        """Where a failure comes from, by the cross-check; a sentence, none where nothing is in doubt."""
        c = self.cross_check
        if c is None or not (c.failure or len(self.failures) > (self.lossy is not None)):
            return []
        if self.foreign:
            means = (
                "the reference is not the model that the engine serves. Compare their weights, precision and "
                "quantisation; whether the engine samples rightly is not shown."
            )
        elif c.failure:
            means = "those reported as they were sampled agree with it, so the engine's reading of prompts is in doubt."
        else:
            means = "the reference is the model that the engine serves, so the fault is in how it samples or drafts."
        read = f"the engine without drafts read {c.n} of these tokens as prompts, and its log-probabilities are"
        return [f"{read} {c.distance}: {means}"]

    @property
    def reasons(self) -> tuple[str, ...]:
        """Sentences; empty for a pass without doubts."""
        return (*self.failures, *self.missing, *self.origin, *self.notes)

    @property
    def finding(self) -> str:
        """The headline: the gravest finding. A sentence about the tokens rests on tests of the tokens."""
        if self.verdict == "pass":
            return "PASS: the sampled tokens follow the target's distribution"
        if self.verdict == "inconclusive":
            return "INCONCLUSIVE: this audit shows nothing"
        if self.foreign and self.failures:
            return "FAIL: the reference is not the model that the engine serves; nothing is shown about sampling"
        if any(t.p_adjusted <= self.alpha for t in self.tests) or (self.noise and self.noise.failure):
            return "FAIL: the engine does not sample from the target"
        if self.lossy is not None:
            return "FAIL: rollouts are lossy by their configuration; no test rejects the engine's own tokens"
        if self.greedy and self.greedy.failure:
            return "FAIL: greedy responses change with drafts; no test rejects the sampled tokens"
        return "FAIL: the engine reports log-probabilities that are not the target's; no test rejects its tokens"

    @property
    def min_p(self) -> float:
        """The smallest p-value before adjustment."""
        return min((t.p_value for t in self.tests), default=1.0)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able mapping of everything above."""
        out = asdict(self)
        for name in ("verdict", "reasons", "finding", "min_p"):
            out[name] = getattr(self, name)
        out["n_tests"] = len(self.tests)
        for name in ("log_probs", "greedy", "noise", "cross_check"):
            if (check := getattr(self, name)) is not None:
                out[name]["passed"] = not check.failure
        if self.drafts is not None:
            out["drafts"]["rejected"] = self.drafts.rejected
        return out


def tie(dtype: str) -> float:
    """Distance of two logits that rounding may decide either way, in an engine of this precision."""
    return TIE if dtype == "float32" else TIE_HALF


def check_log_probs(evidence: Evidence, dtype: str = "float32") -> LogProbCheck | None:
    """Compare what the engine reported with the reference; None where it reported nothing."""
    if evidence.samples.log_probs is None:
        return None
    return compare(evidence.samples.log_probs, [evidence.log_prob], dtype)


def compare(engine: Sequence[Floats], reference: Sequence[Floats], dtype: str) -> LogProbCheck:
    """Log-probabilities of the same tokens by the engine and by the reference."""
    reported, wanted = (np.concatenate([*values, np.zeros(0)]) for values in (engine, reference))
    finite = np.isfinite(reported)
    error = np.abs(reported[finite] - wanted[finite])
    return LogProbCheck(
        n=len(reported),
        not_finite=int((~finite).sum()),
        max_error=float(error.max(initial=0.0)),
        mean_error=float(error.mean()) if len(error) else 0.0,
        max_allowed=MAX_LOG_PROB_ERROR if dtype == "float32" else None,
        mean_allowed=MEAN_LOG_PROB_ERROR if dtype == "float32" else MEAN_LOG_PROB_ERROR_HALF,
    )


def check_greedy(
    reference: Sequence[Ints],
    subject: Samples,
    gap: Callable[[int, list[int], int, int], float],
    dtype: str = "float32",
    drafts: DraftCounts | None = None,
) -> GreedyCheck:
    """Compare greedy responses with drafts, any number per prompt, with the [prompt] ones without, token by token.

    Args:
        gap: (prompt, prefix tokens, token a, token b) -> how much larger a's logit is in the reference model, a and b
            being the two engines' tokens. Called only where they part.
    """
    identical, ties, compared = 0, 0, 0
    mismatches: list[Mismatch] = []
    for prompt, tokens in zip(subject.prompt.tolist(), subject.tokens, strict=True):
        want = reference[prompt]
        n = min(len(want), len(tokens))
        at = int(np.append(np.flatnonzero(want[:n] != tokens[:n]), n)[0])
        compared += at
        if at < n:
            a, b = int(want[at]), int(tokens[at])
            distance = abs(gap(prompt, want[:at].tolist(), a, b))
            if distance <= tie(dtype):
                ties += 1
            else:
                mismatches.append(Mismatch(prompt, at, a, b, distance))
        elif len(want) == len(tokens):
            identical += 1
        else:  # one ended where the other continued: no tie can do that
            mismatches.append(Mismatch(prompt, at))
    return GreedyCheck(len(subject.tokens), compared, identical, ties, tuple(mismatches), drafts)
