"""What a swap of drafter weights and the capture of training samples cost a running engine, by `benchmarks.swap`."""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmarks import swap
from benchmarks.gpu import models
from benchmarks.gpu.engine import call, environment
from benchmarks.gpu.plan import NotHereError, Spec


def pauses(spec: Spec) -> dict[str, Any]:
    """Pauses of swaps between the steps of a running batch, against the steps without one."""
    llm = _engine(spec)
    try:
        return swap.swaps(llm, 4 if spec.quick else 100)
    finally:
        llm.llm_engine.engine_core.shutdown()


def capture(spec: Spec) -> dict[str, Any]:
    """Time with capture over time without it, by batch size, in alternating pairs."""
    llm = _engine(spec)
    try:
        found = swap.captures(llm, spec.quick)
        return {batch: row | {"ratio": dataclasses.asdict(row["ratio"])} for batch, row in found.items()}
    finally:
        llm.llm_engine.engine_core.shutdown()


def _engine(spec: Spec) -> Any:
    environment(spec)
    cuda = spec.device == "cuda"
    llm = swap.engine(
        models.real(spec), "bfloat16" if cuda else "float32", speculate=True, enforce_eager=not cuda
    )  # fmt: skip
    if "drafter" not in (info := call(llm, "info")):
        llm.llm_engine.engine_core.shutdown()
        raise NotHereError(f"this engine runs no head under rollspec (state {info.get('state')}: {info.get('reason')})")
    return llm
