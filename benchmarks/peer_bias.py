"""How far a lossy arm's samples are from the policy, from what it said while its speed was measured.

The rule's distribution is known in full from two reference models, the policy of an epoch and that of the epoch before,
so the distance can be measured without binning (`benchmarks/two_policies.py: check_lossy`).
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MOST = 40_000
"""Positions looked at in each epoch: of so many a distance of 0.01 is about six standard errors."""
FOUND = 3.3
"""Standard errors from none at which a bias counts as found: p < 1e-3."""


@dataclass(frozen=True)
class Ruled:
    """An epoch's responses, of all seeds. `ruled`: leading tokens of each that the rule decided."""

    prompts: list[list[int]]
    texts: list[list[int]]
    ruled: list[int]

    def and_(self, other: Ruled) -> Ruled:
        """With those of another seed."""
        return Ruled(self.prompts + other.prompts, self.texts + other.texts, self.ruled + other.ruled)


def distance(epochs: Mapping[int, Ruled], model: str, weights: Sequence[str], bias: float) -> list[dict[str, Any]]:
    """For each epoch: total variation from the policy at the positions that the rule decided, measured with one
    standard error, and as the rule's formula gives it (`LossyCheck`). `z`: how many standard errors from none.

    Args:
        epochs: by number, from 1.
        weights: file of each epoch's policy; "" is `model` itself.
    """
    import numpy as np

    from benchmarks.two_policies import check_lossy
    from rollspec.audit.evidence import Samples

    out = []
    for number, e in sorted(epochs.items()):
        new, old = (_reference(model, weights[i]) for i in (number, number - 1))
        rows = np.arange(len(e.texts), dtype=np.int64)
        samples = Samples(tuple(np.asarray(t, dtype=np.int64) for t in e.texts), rows, np.zeros_like(rows))
        found = check_lossy(samples, np.asarray(e.ruled, dtype=np.int64), e.prompts, new, old, bias, MOST)
        out.append({"epoch": number, **_row(found)})
    return out


def overall(rows: Sequence[Mapping[str, Any]]) -> float:
    """Standard errors from none, of several of `distance` together."""
    error = math.sqrt(sum((r["positions"] * r["error"]) ** 2 for r in rows))
    return sum(r["positions"] * r["measured"] for r in rows) / error if error else 0.0


def pooled(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several of `distance` as one, of the same epoch in several calls."""
    from benchmarks.two_policies import LossyCheck

    n = sum(r["positions"] for r in rows)

    def mean(name: str) -> float:
        return float(sum(r["positions"] * r[name] for r in rows) / n) if n else 0.0

    error = math.sqrt(sum((r["positions"] * r["error"]) ** 2 for r in rows)) / n if n else 0.0
    counts = {name: sum(r[name] for r in rows) for name in ("tokens", "ruled", "positions")}
    largest = max((r["largest"] for r in rows), default=0.0)
    return _row(LossyCheck(**counts, measured=mean("measured"), error=error, theory=mean("theory"), largest=largest,
                           bias=rows[0]["bias"]))  # fmt: skip


def joined(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`distance` of an earlier call and of this one, which had other seeds, epoch by epoch."""
    epochs = sorted({r["epoch"] for r in (*before, *now)})
    return [{"epoch": e, **pooled([r for r in (*before, *now) if r["epoch"] == e])} for e in epochs]


def _row(found: Any) -> dict[str, Any]:
    z = found.measured / found.error if found.error else 0.0
    return {**asdict(found), "agrees": found.agrees, "z": z}


def _reference(model: str, weights: str) -> Any:
    """The reference model of an epoch: the checkpoint with its weights exchanged."""
    from rollspec.audit.reference import Reference

    if not weights:
        return Reference(model, 1.0)
    with tempfile.TemporaryDirectory() as folder:
        for file in Path(model).iterdir():
            if file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
                (Path(folder) / file.name).symlink_to(file.resolve())
        (Path(folder) / "model.safetensors").symlink_to(Path(weights).resolve())
        return Reference(folder, 1.0)
