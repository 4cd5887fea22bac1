"""Counters of an engine's worker between two drains: sums and levels, sent between processes, merged over replicas."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from rollspec.tuning.tuner import LEARNED

LEVELS = ("version", "peak_batch")
SUMS_BY_KEY = ("faults", "plays", "lenient", "drafter", "modelled", "predicted_by")


@dataclass(slots=True)
class EngineStats:
    """Sums over the steps since the last drain, from one engine worker. JSON-able through `to_dict`."""

    steps: int = 0
    step_seconds: float = 0.0
    tail_seconds: float = 0.0
    propose_seconds: float = 0.0
    requests: int = 0  # request-steps: sum over steps of requests that sampled
    verified: int = 0  # request-steps whose draft was verified
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    predicted: float = 0.0  # sum of calibrated acceptance probabilities of the drafted tokens
    by_position: list[list[int]] = field(default_factory=list)  # [[verified_i, accepted_i], ...]
    by_source: dict[str, list[int]] = field(default_factory=dict)  # drafter -> [drafts, drafted, accepted]
    predicted_by: dict[str, float] = field(default_factory=dict)  # drafter -> its part of `predicted`
    peak_batch: int = 0
    version: int = 0
    speculating: bool = True
    history_bytes: int = 0
    corpus_bytes: int = 0
    prompts: int = 0
    evicted: int = 0
    rewarded: int = 0
    faults: dict[str, int] = field(default_factory=dict)  # cause -> count
    tuner_seconds: float = 0.0  # deciding how much to draft, part of propose_seconds
    plays: dict[str, int] = field(default_factory=dict)  # arm -> steps
    modelled: dict[str, float] = field(default_factory=dict)  # setting -> seconds by the cost model (tuning/regret.py)
    cost_error: float | None = None  # median relative error of the cost model's latest predictions
    cost_skipped: int = 0  # steps without a usable time
    alarms: int = 0  # drafters switched off
    recoveries: int = 0  # drafters switched on again
    drafters_off: list[str] = field(default_factory=list)
    correlated: bool = False  # whether noise is kept over epochs
    reuse: list[int] = field(default_factory=lambda: [0, 0, 0, 0])  # responses, their tokens, repeated, identical
    drafter: dict[str, float] = field(default_factory=dict)  # what became of the learned drafter: sums, by metric
    drafter_levels: dict[str, float] = field(default_factory=dict)  # and levels
    passes: int = 0  # of the learned drafter
    pass_seconds: float = 0.0
    max_prob: list[float] = field(default_factory=lambda: [0.0, 0.0])  # sum of the target's largest p, rows
    lenient: dict[str, float] = field(default_factory=dict)  # counts of lenient reuse (sampling/lenient_reuse.py)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types only: this crosses process borders."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EngineStats:
        """Inverse of `to_dict`. Unknown keys raise TypeError: both ends are one version of rollspec."""
        return cls(**data)

    @classmethod
    def merge(cls, parts: Iterable[EngineStats]) -> EngineStats:
        """Sum over replicas; levels (version, batch) take the maximum, `speculating` holds if any replica does.

        Levels of the learned drafter that are means take the mean over replicas (`MEANS`).
        """
        out = cls(speculating=False)
        parts = list(parts)
        out.drafter_levels = _merged_levels(parts)
        for p in parts:
            for name in SUMS:
                setattr(out, name, getattr(out, name) + getattr(p, name))
            both = itertools.zip_longest(out.by_position, p.by_position, fillvalue=(0, 0))
            out.by_position = [_added(*rows) for rows in both]
            for source, row in p.by_source.items():
                out.by_source[source] = _added(out.by_source.get(source, [0, 0, 0]), row)
            for name in SUMS_BY_KEY:
                sums = getattr(out, name)
                sums |= {key: sums.get(key, 0) + value for key, value in getattr(p, name).items()}
            out.correlated = out.correlated or p.correlated
            out.reuse = _added(out.reuse, p.reuse)
            out.max_prob = _added(out.max_prob, p.max_prob)
            if p.cost_error is not None:
                out.cost_error = max(out.cost_error or 0.0, p.cost_error)
            out.drafters_off = sorted({*out.drafters_off, *p.drafters_off})
            for name in LEVELS:
                setattr(out, name, max(getattr(out, name), getattr(p, name)))
            out.speculating = out.speculating or p.speculating
        return out


SUMS = tuple(f.name for f in fields(EngineStats) if f.type in ("int", "float") and f.name not in LEVELS)
"""Plain numbers add up over replicas, those in `LEVELS` apart."""

MEANS = {"accept_length": "drafted", "loss": "steps", "train_length": "steps", "micro_step_seconds": "steps"}
"""Levels of a learned drafter that are means, and what replicas weigh in them by: tokens it drafted, or steps of its
training, in the interval. `loss/<term>` is as `loss`. Other levels take the maximum, which is the worst case."""


def _added(a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
    return [x + y for x, y in zip(a, b, strict=True)]


def _merged_levels(parts: Sequence[EngineStats]) -> dict[str, float]:
    out: dict[str, float] = {}
    for name in dict.fromkeys(n for p in parts for n in p.drafter_levels):
        having = [p for p in parts if name in p.drafter_levels]
        values = [p.drafter_levels[name] for p in having]
        by = MEANS.get(name.partition("/")[0])
        if by is None:
            out[name] = max(values)
            continue
        weights = [_weight(p, by) for p in having]
        if not sum(weights):  # nothing new anywhere
            weights = [1.0] * len(values)
        out[name] = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    return out


def _weight(p: EngineStats, by: str) -> float:
    if by == "steps":
        return p.drafter.get("train_steps", 0.0)
    return float(sum(p.by_source[n][1] for n in LEARNED if n in p.by_source))
