"""A whole audit: the engines, the reference model, the tests, the verdict."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from rollspec import __version__
from rollspec.audit import identity
from rollspec.audit.distribution import distribution_tests
from rollspec.audit.engine import ARM_SECONDS, GREEDY_ROUNDS, Arm, ArmOutput, Plan, Progress, run_arm
from rollspec.audit.evidence import Evidence, Samples
from rollspec.audit.noise import NoiseCheck, Witness, first_round, keys_of
from rollspec.audit.power import detectable
from rollspec.audit.reference import Reference
from rollspec.audit.statistics import TestResult
from rollspec.audit.verdict import (
    ALPHA,
    TIE,
    TIE_HALF,
    AuditResult,
    LogProbCheck,
    check_greedy,
    check_log_probs,
    conclude,
)
from rollspec.config import RollspecConfig
from rollspec.machine import git_sha, machine, now

Stage = Callable[[str], Progress]
"""Called when a stage begins, with its name; returns the callback for its progress."""


def run_audit(
    model: str | Path,
    plan: Plan,
    subject: Arm,
    *,
    alpha: float = ALPHA,
    timeout: float = ARM_SECONDS,
    device: str = "auto",
    stage: Stage | None = None,
    control: bool = True,
) -> AuditResult:
    """Audit `subject` against the same engine without drafts (greedy) and against the target's probabilities (sampled).

    Args:
        timeout: seconds for each engine process.
        device: of the reference model.
        control: after a failure, sample from the engine without speculation too and say whether that fails as well.

    Raises:
        AuditError: an engine or the reference model does not run.
    """
    announce = stage or (lambda _: lambda done, total: None)
    began = now()
    seconds: dict[str, float] = {}
    cpu_seconds: dict[str, float] = {}

    def timed(name: str, run: Callable[[Progress], Any]) -> Any:
        start = time.perf_counter(), time.process_time()
        out = run(announce(name))
        seconds[name] = round(time.perf_counter() - start[0], 1)
        engine = out.cpu_seconds if isinstance(out, ArmOutput | Judged) else 0.0
        cpu_seconds[name] = round(time.process_time() - start[1] + engine, 1)
        return out

    plain = Arm.plain(subject.engine)
    reference: ArmOutput = timed(
        f"greedy, {plain.name}",
        lambda p: run_arm(model, plan, plain, sample=False, greedy_rounds=1, timeout=timeout, progress=p),
    )
    output: ArmOutput = timed(
        f"sampling, {subject.name}", lambda p: run_arm(model, plan, subject, timeout=timeout, progress=p)
    )
    target: Reference = timed("loading the reference model", lambda p: Reference(model, plan.temperature, device))
    judged: Judged = timed("target's probabilities", lambda p: judge(output.samples, target, plan, subject, p))
    greedy = check_greedy(
        reference.greedy.tokens,
        output.greedy,
        lambda i, r, a, b: target.gap(plan.prompts[i], r, a, b),
        plan.dtype,
        output.greedy_drafts,
    )
    result = conclude(
        judged.tests,
        output.samples.n_tokens,
        alpha=alpha,
        log_probs=judged.log_probs,
        greedy=greedy,
        noise=judged.noise,
        drafts=output.drafts if subject.speculates and subject.drafts else None,
        lossy=subject.lossy,
        power=detectable(judged.evidence, len(judged.tests), alpha),
    )
    reasons = list(result.reasons)
    if output.off is not None:
        reasons.append(f"rollspec did not speculate in this engine: {output.off}.")
    provenance = _provenance(model, plan, subject, target)
    provenance |= {"mean_entropy": judged.entropy, "seconds": seconds, "began": began, "ended": now()}
    provenance["cpu_seconds"] = cpu_seconds
    if result.verdict == "fail" and control and subject.speculates and subject.lossy is None:

        def sample_again(p: Progress) -> Judged:
            again = run_arm(model, plan, plain, greedy_rounds=0, timeout=timeout, progress=p)
            return replace(judge(again.samples, target, plan, plain, p), cpu_seconds=again.cpu_seconds)

        sentence, provenance["control"] = _control(timed(f"sampling, {plain.name}", sample_again), alpha)
        reasons.append(sentence)
    return replace(result, reasons=tuple(reasons), provenance=provenance)


@dataclass(frozen=True, slots=True)
class Judged:
    """What one engine's samples say. `entropy`: nats per token on average. `cpu_seconds`: of the engine, where judging
    is one stage with sampling.
    """

    tests: list[TestResult]
    log_probs: LogProbCheck | None
    entropy: float
    noise: NoiseCheck | None
    evidence: Evidence
    cpu_seconds: float = 0.0


def judge(
    samples: Samples,
    target: Reference,
    plan: Plan,
    arm: Arm,
    progress: Progress | None = None,
    version: int = GREEDY_ROUNDS,
) -> Judged:
    """Test what `arm` sampled. `version`: of the policy in round 0, which decides coupled noise."""
    config = RollspecConfig.from_dict(arm.rollspec) if arm.rollspec is not None else None
    # Kept noise repeats with every round: only the first is a sample of the distribution.
    independent = first_round(samples) if config is not None and config.reuse.seeds == "keep" else samples
    evidence = Evidence(independent, target.vocab, np.random.default_rng(plan.seed))
    witness = None
    if config is not None and config.mode == "coupled":
        keys = keys_of(samples, plan.prompts, config, int(arm.engine.get("seed", plan.seed)), version)
        witness = Witness(samples, evidence, keys, plan.prompts, TIE.get(plan.dtype, TIE_HALF))
    target.fill(witness or evidence, plan.prompts, progress)
    entropy = float(evidence.entropy.mean()) if independent.n_tokens else 0.0
    found = witness.result() if witness else None
    return Judged(distribution_tests(evidence), check_log_probs(evidence, plan.dtype), entropy, found, evidence)


def _control(judged: Judged, alpha: float) -> tuple[str, dict[str, Any]]:
    """Whether speculation is to blame: the same tests on the engine without it."""
    result = conclude(judged.tests, judged.evidence.samples.n_tokens, alpha=alpha, log_probs=judged.log_probs)
    if result.verdict == "fail":
        sentence = (
            "the same engine without speculation fails too, so that alone is not the cause: compare the "
            "engine's checkpoint, precision and sampling with the reference's."
        )
    else:
        sentence = "the same engine without speculation passes, so the failure comes with speculation."
    return sentence, {"verdict": result.verdict, "min_p": result.min_p, "n_tokens": result.n_tokens}


def _provenance(model: str | Path, plan: Plan, subject: Arm, target: Reference) -> dict[str, Any]:
    import torch

    from rollspec.engine.vllm.compat import vllm_version

    plain = asdict(plan)
    return {
        "model": str(model),
        "subject": asdict(subject),
        "plan": plain | {"prompts": len(plain["prompts"]), "prompts_blake2b": identity.prompts(plan.prompts)},
        "checkpoint": identity.checkpoint(model),
        "reference_device": target.device,
        "machine": machine() | {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None},
        "git_sha": git_sha(),
        "versions": {
            "rollspec": __version__,
            "vllm": vllm_version(),
            **{name: str(import_module(name).__version__) for name in ("torch", "transformers", "numpy", "scipy")},
            "python": platform.python_version(),
        },
    }
