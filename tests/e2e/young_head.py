"""A draft head so young that no step of it pays, in a whole job, and what the job's metrics count of it.

Small steps and quick verdicts: what is tested is that all parts move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SETTINGS: dict[str, Any] = {
    "drafter.publish_every": 2,
    "drafter.training.batch_tokens": 128,
    "drafter.capture.share": 1.0,
    "proposal.learned.canary_drafts": 4,
    "proposal.learned.k_max": 2,
}
OVERRIDES = tuple(f"{name}={value}" for name, value in SETTINGS.items())
"""The same for a command line."""


def totals(rows: Sequence[dict[str, Any]], *names: str) -> dict[str, float]:
    """Sums over steps of `rollspec/drafter/<name>`."""
    return {name: sum(row.get(f"rollspec/drafter/{name}", 0.0) for row in rows) for name in names}
