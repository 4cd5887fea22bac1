"""How far a lossy arm's samples are from the policy, from what it said while its speed was measured.

The rule's distribution is known in full from two reference models, the policy of an epoch and that of the epoch before,
so the distance can be measured without binning (`benchmarks/two_policies.py: check_lossy`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MOST = 40_000
"""Positions looked at in each epoch: of so many a distance of 0.01 is about six standard errors."""


@dataclass(frozen=True)
class Ruled:
    """An epoch's responses. `ruled`: leading tokens of each that the rule decided."""

    prompts: list[list[int]]
    texts: list[list[int]]
    ruled: list[int]


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
        found_by = found.measured / found.error if found.error else 0.0
        out.append({"epoch": number, **asdict(found), "agrees": found.agrees, "z": found_by})
    return out


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
