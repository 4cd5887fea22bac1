"""Engines of the audit in the tests' own way: started in two seconds, ended with the test."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines import KV_BYTES, call, close

from rollspec.audit import engine as audit_engine
from rollspec.audit import worker as audit_worker
from rollspec.audit.engine import AuditJob, AuditPlan, Variant, run_arm
from rollspec.audit.reference import Reference
from rollspec.audit.run import judge
from rollspec.audit.verdict import AuditResult

PROMPTS = tuple(tuple(range(3 + i, 11 + i)) for i in range(6))
EVERYTHING = ["proposal.budget.rule=fixed", "tuning.strategy=static", "tuning.guard.enabled=false"]
"""Is verified, whatever it costs here."""

SWITCHING = ["tuning.strategy=random", "tuning.guard.enabled=false"]
COUPLED = ["mode=coupled", *SWITCHING]


@contextmanager
def engine_of(job: AuditJob) -> Iterator[Any]:
    small = replace(job.arm, engine={"kv_cache_memory_bytes": KV_BYTES, **job.arm.engine})
    llm = audit_worker.build(replace(job, arm=small))
    try:
        yield llm
    finally:
        close(llm)


def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """`run_arm` without a process of its own, which imports vLLM three times; the whole command has them."""

    def run(name: str, folder: Path, timeout: float, progress: Any) -> None:
        job = pickle.loads((folder / "job").read_bytes())
        with engine_of(job) as llm:
            audit_worker.work(llm, folder, job)

    monkeypatch.setattr(audit_engine, "_run_process", run)


def audit(model: Path, arm: Variant, tokens: int, *, sure: bool = False, **plan: Any) -> AuditResult:
    """The sampled half of an audit: one engine, the tests, the verdict.

    Args:
        sure: of an engine that must pass: of a thousand such audits one fails by chance, but no two in a row.
    """
    for seed in (0, 1):
        given = AuditPlan(PROMPTS, **{"tokens": tokens, "max_tokens": 48, "seed": seed, **plan})
        out = run_arm(model, given, arm, greedy_rounds=0)
        result = judge(out.samples, Reference(model, given.temperature), given, arm, version=0)
        result = replace(result, drafts=out.drafts if arm.drafts else None, provenance={"off": out.off})
        if result.verdict == "pass" or not sure:
            break
    return result


def step_by_step(llm: Any, requests: Sequence[Any], params: Any, act: Callable[[int], None]) -> list[Any]:
    """`llm.generate`, with `act(steps so far)` before every engine step."""
    engine = llm.llm_engine
    for i, request in enumerate(requests):
        engine.add_request(str(i), request, params)
    done: dict[str, Any] = {}
    steps = 0
    while engine.has_unfinished_requests():
        act(steps)
        done |= {o.request_id: o for o in engine.step() if o.finished}
        steps += 1
    return [done[str(i)] for i in range(len(requests))]


class Swapping:
    """An engine of the audit whose drafter's weights are replaced every 17 steps, while requests run."""

    def __init__(self, llm: Any, folders: Sequence[Path]) -> None:
        self._llm, self._folders = llm, folders
        self.answers: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def generate(self, requests: list[Any], params: Any, use_tqdm: bool) -> list[Any]:
        return step_by_step(self._llm, requests, params, self._act)

    def _act(self, steps: int) -> None:
        if steps % 17 == 16:
            n = len(self.answers) + 1
            folder = self._folders[n % len(self._folders)]
            self.answers.append(call(self._llm, "swap", dir=str(folder), version=n, canary=False, wait=True))
