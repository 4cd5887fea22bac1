"""Acceptance per domain: counts over requests by the domain that they name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drafter_online.engines import MOST_DOMAINS, OTHER
from rollspec.head import metadata


class Domains:
    """Counts since the engine began, by domain: [requests, steps, drafts, drafted, accepted, emitted]."""

    def __init__(self, running: Mapping[str, Any]) -> None:
        self._running = running
        self._rows: dict[str, list[int]] = {}
        self._of: dict[str, list[int]] = {}  # running requests
        self.private = 0  # requests

    def observe(
        self, req_ids: Sequence[str], tokens: Sequence[Sequence[int]], scheduled: Mapping[str, Sequence[int]]
    ) -> None:
        """A step emitted `tokens`, of which all but each request's last one were drafts, `scheduled` by request."""
        for req_id, new in zip(req_ids, tokens, strict=False):
            if not new:
                continue
            row = self._of.get(req_id)
            if row is None:
                row = self._of[req_id] = self._begin(req_id)
            verified = len(scheduled.get(req_id, ()))
            row[1] += 1
            row[2] += verified > 0
            row[3] += verified
            row[4] += min(len(new) - 1, verified)
            row[5] += len(new)

    def forget(self, req_id: str) -> None:
        """A request ended."""
        self._of.pop(req_id, None)

    def to_dict(self) -> dict[str, list[int]]:
        """The counts, in JSON types."""
        return {name: list(row) for name, row in list(self._rows.items())}

    def _begin(self, req_id: str) -> list[int]:
        found = metadata.of_running(self._running, req_id)
        self.private += found.private
        name = found.domain if found.domain in self._rows or len(self._rows) < MOST_DOMAINS else OTHER
        row = self._rows.setdefault(name, [0] * 6)
        row[0] += 1
        return row
