"""A whole audit: the engines, the reference model, the tests, the verdict."""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from rollspec import __version__
from rollspec.audit.distribution import detectable, distribution_tests
from rollspec.audit.engine import ARM_SECONDS, GREEDY_ROUNDS, AuditPlan, Given, Progress, Variant, run_arm
from rollspec.audit.evidence import Evidence, Samples
from rollspec.audit.noise import Witness, first_round, keys_of
from rollspec.audit.reference import Reference
from rollspec.audit.verdict import ALPHA, AuditResult, check_greedy, check_log_probs, compare, tie
from rollspec.config import RollspecConfig
from rollspec.machine import git_sha, local_folder, machine, now

READ = 8
"""Responses that the engine without drafts reads as prompts."""

Stage = Callable[[str], Progress]
"""Called when a stage begins, with its name; returns the callback for its progress."""


def run_audit(
    model: str | Path,
    plan: AuditPlan,
    subject: Variant,
    *,
    alpha: float = ALPHA,
    timeout: float = ARM_SECONDS,
    device: str = "auto",
    stage: Stage | None = None,
) -> AuditResult:
    """Audit `subject` against the same engine without drafts (greedy) and against the target's probabilities (sampled).

    Args:
        timeout: seconds for each engine process.
        device: of the reference model.

    Raises:
        AuditError: an engine or the reference model does not run.
    """
    announce = stage or (lambda _: lambda done, total: None)
    began = now()
    seconds: dict[str, float] = {}

    @contextmanager
    def timed(name: str) -> Iterator[Progress]:
        start = time.perf_counter()
        yield announce(name)
        seconds[name] = round(time.perf_counter() - start, 1)

    plain = Variant.plain(subject.engine)
    with timed(f"sampling, {subject.name}") as progress:
        output = run_arm(model, plan, subject, timeout=timeout, progress=progress)
    given = one_of_each(output.samples, plan)
    with timed(f"greedy, {plain.name}"):
        without = run_arm(model, replace(plan, tokens=0), plain, greedy_rounds=1, score=given, timeout=timeout)
    with timed("loading the reference model"):
        target = Reference(model, plan.temperature, device)
    with timed("target's probabilities") as progress:
        result = judge(output.samples, target, plan, subject, progress, alpha=alpha)
    greedy = check_greedy(
        without.greedy.tokens,
        output.greedy,
        lambda i, r, a, b: target.gap(plan.prompts[i], r, a, b),
        plan.dtype,
        output.greedy_drafts,
    )
    result = replace(
        result,
        greedy=greedy,
        drafts=output.drafts if subject.drafts else None,
        lossy=subject.lossy,
        provenance=result.provenance
        | _provenance(model, plan, subject, target)
        | {"seconds": seconds, "began": began, "ended": now()},
    )
    notes = [f"rollspec did not speculate in this engine: {output.off}."] if output.off else []
    if isinstance(without.scored, str):
        notes.append(f"the reference is not cross-checked: the engine scored no prompts ({without.scored}).")
    elif given:
        read = compare(without.scored, [target.score(*each) for each in given], plan.dtype)
        result = replace(result, cross_check=read)
    if result.verdict == "fail" and subject.drafts and subject.lossy is None and not result.foreign:
        notes.append("an audit with `--speculative-config none` shows whether drafts are to blame: it has none.")
    return replace(result, notes=tuple(notes))


def one_of_each(samples: Samples, plan: AuditPlan) -> Given:
    """The first response to each of the first `READ` prompts."""
    _, first = np.unique(samples.prompt, return_index=True)
    return tuple((plan.prompts[samples.prompt[s]], tuple(samples.tokens[s].tolist())) for s in first[:READ])


def judge(
    samples: Samples,
    target: Reference,
    plan: AuditPlan,
    arm: Variant,
    progress: Progress | None = None,
    version: int = GREEDY_ROUNDS,
    alpha: float = ALPHA,
) -> AuditResult:
    """Test what `arm` sampled. `version`: of the policy in round 0, which decides coupled noise."""
    config = RollspecConfig.from_dict(arm.rollspec) if arm.rollspec is not None else None
    # Kept noise repeats with every round: only the first is a sample of the distribution.
    independent = first_round(samples) if config is not None and config.reuse.seeds == "keep" else samples
    evidence = Evidence(independent, target.vocab, np.random.default_rng(plan.seed))
    witness = None
    if config is not None and config.mode == "coupled":
        keys = keys_of(samples, plan.prompts, config, int(arm.engine.get("seed", plan.seed)), version)
        witness = Witness(samples, evidence, keys, plan.prompts, tie(plan.dtype))
    target.fill(witness or evidence, plan.prompts, progress)
    tests = distribution_tests(evidence)
    return AuditResult(
        tests,
        samples.n_tokens,
        alpha,
        log_probs=check_log_probs(evidence, plan.dtype),
        noise=witness.found if witness else None,
        power=detectable(evidence, len(tests), alpha),
        provenance={"mean_entropy": float(evidence.entropy.mean()) if independent.n_tokens else 0.0},
    )


def _provenance(model: str | Path, plan: AuditPlan, subject: Variant, target: Reference) -> dict[str, Any]:
    import torch

    from rollspec.engine.vllm.compat import vllm_version

    packages = ("torch", "transformers", "numpy", "scipy")
    return {
        "model": str(model),
        "subject": asdict(subject),
        "plan": asdict(plan) | {"prompts": len(plan.prompts), "prompts_blake2b": prompts_hash(plan.prompts)},
        "checkpoint": checkpoint(model),
        "reference_device": target.device,
        "machine": machine() | {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None},
        "git_sha": git_sha(),
        "versions": {"rollspec": __version__, "vllm": vllm_version(), "python": platform.python_version()}
        | {name: str(import_module(name).__version__) for name in packages},
    }


def checkpoint(model: str | Path) -> dict[str, Any]:
    """`files`, `bytes`, `blake2b` (16 bytes) of the safetensors files of a checkpoint, and `of` what of them.

    Each file's name and size go in as `name NUL size NUL`, then its bytes, in the order of names. `blake2b` is None
    where there are no such files or they cannot be read, and `of` says so. Never raises.
    """
    h, total = hashlib.blake2b(digest_size=16), 0
    try:
        files = sorted(local_folder(model).glob("*.safetensors"))
        for file in files:
            total += (size := file.stat().st_size)
            h.update(f"{file.name}\0{size}\0".encode())
            with file.open("rb") as f:
                while part := f.read(1 << 24):
                    h.update(part)
    except Exception as e:  # an audit is worth more than its checkpoint's name
        return {"files": 0, "bytes": total, "blake2b": None, "of": f"not hashed ({type(e).__name__}: {e})"}
    if not files:
        return {"files": 0, "bytes": 0, "blake2b": None, "of": "not hashed: there is no safetensors file"}
    return {"files": len(files), "bytes": total, "blake2b": h.hexdigest(), "of": "names, sizes and contents"}


def prompts_hash(token_ids: Sequence[Sequence[int]]) -> str:
    """BLAKE2b (16 bytes) of the prompts' token ids, as JSON without spaces."""
    text = json.dumps(token_ids, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
