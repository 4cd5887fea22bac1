"""Alarms of the daemon: faults that are present now."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Alarm:
    """Something that an operator should look at. `since`: Unix time."""

    kind: str
    text: str
    since: float


class Alarms:
    """Alarms that are on, by kind, oldest first; each is logged when it is raised."""

    def __init__(self) -> None:
        self._on: dict[str, Alarm] = {}

    def set(self, kind: str, text: str | None) -> None:
        """Switch an alarm on (a sentence) or off (None)."""
        if text is None:
            self._on.pop(kind, None)
            return
        before = self._on.get(kind)
        if before is None:
            log.warning("drafter-online: %s", text)
        self._on[kind] = Alarm(kind, text, time.time() if before is None else before.since)

    def __iter__(self) -> Iterator[Alarm]:
        return iter(list(self._on.values()))
