"""A draft head so young that no step of it pays, in a whole job, and what the job's metrics count of it.

Small steps and quick verdicts: what is tested is that all parts move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drafter_online.versions import Versions

SETTINGS: dict[str, Any] = {
    "drafter.publish_every": 2,
    "drafter.training.batch_tokens": 128,
    "drafter.capture.share": 1.0,
    "proposal.head.canary_drafts": 4,
    "proposal.head.k_max": 2,
}
VERIFIED: dict[str, Any] = {
    "tuning.strategy": "static",
    "tuning.arms": [2],
    "tuning.guard.enabled": False,
    "proposal.budget.rule": "fixed",
}
"""What it drafts is verified all the same."""

RESUMED: dict[str, Any] = {**SETTINGS, "proposal.head.canary_drafts": 0}
"""Of a job that takes up the version of `promote_by_hand`: four drafts of so young a head decide by chance."""

OVERRIDES, RESUMED_OVERRIDES = (tuple(f"{name}={value}" for name, value in s.items()) for s in (SETTINGS, RESUMED))
"""The same for a command line."""


def totals(rows: Sequence[dict[str, Any]], *names: str) -> dict[str, float]:
    """Sums over steps of `rollspec/drafter/<name>`."""
    return {name: sum(row.get(f"rollspec/drafter/{name}", 0.0) for row in rows) for name in names}


BY_HAND = 1_000_000
"""Versions above it were published by `promote_by_hand`; no job here comes so far."""


def promote_by_hand(store: Versions) -> int:
    """The newest version of a checkpoint's store once more and promoted; its number. Whatever became of so young a
    head, a job that resumes is to have it.
    """
    made, store.floor = store.load(store.numbers()[-1]), BY_HAND
    like_it = {"base": made.manifest.base, "target_version": made.manifest.target_version}
    number = store.publish(made.tensors, made.config, **like_it)
    store.record(number, "promoted", "by hand")
    assert number > BY_HAND and store.promoted() == number
    return number
