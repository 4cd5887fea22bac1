"""Alarms of the daemon: faults that are present now."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass
from typing import Any

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Alarm:
    """Something that an operator should look at. `since`: Unix time."""

    kind: str
    text: str
    since: float


class Alarms:
    """Alarms that are on, by kind; each is logged when it is raised."""

    def __init__(self) -> None:
        self._on: dict[str, Alarm] = {}

    def set(self, kind: str, text: str | None) -> None:
        """Switch an alarm on (a sentence) or off (None)."""
        before = self._on.get(kind)
        if text is None:
            self._on.pop(kind, None)
            return
        if before is None:
            log.warning("drafter-online: %s", text)
        self._on[kind] = Alarm(kind, text, before.since if before is not None else time.time())

    def __iter__(self) -> Any:
        return iter(sorted(self._on.values(), key=lambda a: a.since))

    def to_list(self) -> list[dict[str, Any]]:
        """In JSON types, oldest first."""
        return [asdict(a) for a in self]
