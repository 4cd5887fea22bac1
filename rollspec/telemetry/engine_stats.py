"""Counters of an engine's worker between two drains: sums and levels, sent between processes, merged over replicas."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from rollspec.tuning.tuner import MODEL_DRAFTERS

LEVELS = ("version", "cost_error", "speculating", "correlated")


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
    drafter: dict[str, float] = field(default_factory=dict)  # what became of the draft head: sums, by metric
    drafter_levels: dict[str, float] = field(default_factory=dict)  # and levels
    passes: int = 0  # of the draft head
    pass_seconds: float = 0.0
    max_prob: list[float] = field(default_factory=lambda: [0.0, 0.0])  # sum of the target's largest p, rows
    thinking: list[list[int]] = field(default_factory=lambda: [[0, 0, 0, 0], [0, 0, 0, 0]])
    """Outside of thinking and in it: request-steps, tokens emitted, drafted, accepted."""
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
        """Sum over replicas; `LEVELS` take the maximum, so a flag is whether any replica has it."""
        parts, out = list(parts), cls(speculating=False)
        for name in (f.name for f in fields(cls)):
            start, values = getattr(out, name), [getattr(p, name) for p in parts]
            if name in LEVELS:
                setattr(out, name, max((v for v in values if v is not None), default=start))
            elif name == "drafters_off":
                out.drafters_off = sorted(set().union(*values))
            elif name == "drafter_levels":
                out.drafter_levels = _merged_levels(parts)
            else:
                setattr(out, name, functools.reduce(_added, values, start))
        return out


MEANS = {"accept_length": "drafted", "loss": "steps", "train_length": "steps", "micro_step_seconds": "steps"}
"""Levels of a draft head that are means, and what replicas weigh in them by: tokens it drafted, or steps of its
training, in the interval. `loss/<term>` is as `loss`. Other levels take the worst case: the maximum, of `LEAST` the
minimum.
"""

LEAST = ("version",)
"""Levels of which the least counts: a replica that did not get a version of the head shows."""


def _added(a: Any, b: Any) -> Any:
    """Numbers add up, lists by place and dicts by key; None is nothing."""
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, dict):
        return {key: _added(a.get(key), b.get(key)) for key in a | b}
    if isinstance(a, list):
        return [_added(*both) for both in itertools.zip_longest(a, b)]
    return a + b


def _merged_levels(parts: Sequence[EngineStats]) -> dict[str, float]:
    out: dict[str, float] = {}
    for name in dict.fromkeys(n for p in parts for n in p.drafter_levels):
        having = [p for p in parts if name in p.drafter_levels]
        values = [p.drafter_levels[name] for p in having]
        by = MEANS.get(name.partition("/")[0])
        if by is None:
            out[name] = min(values) if name in LEAST else max(values)
            continue
        if by == "steps":
            weights = [p.drafter.get("train_steps", 0.0) for p in having]
        else:
            weights = [sum(p.by_source[n][1] for n in MODEL_DRAFTERS if n in p.by_source) for p in having]
        # Where nothing is new anywhere, all count the same.
        out[name] = float(np.average(values, weights=weights if any(weights) else None))
    return out
