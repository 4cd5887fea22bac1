"""What the daemon remembers for whoever looks: a point every few seconds, and what is wrong now."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from drafter_online.engines import Counts

log = logging.getLogger(__name__)

POINTS = 1440
EVERY_SECONDS = 5.0


@dataclass(frozen=True)
class Alarm:
    """Something that somebody should look at. `since`: Unix time."""

    kind: str
    text: str
    since: float


class Alarms:
    """Alarms that are on, by kind; each is logged when it goes on."""

    def __init__(self) -> None:
        self._on: dict[str, Alarm] = {}
        self.raised = 0

    def set(self, kind: str, text: str | None) -> None:
        """Switch an alarm on (a sentence) or off (None)."""
        before = self._on.get(kind)
        if text is None:
            self._on.pop(kind, None)
            return
        if before is None:
            self.raised += 1
            log.warning("drafter-online: %s", text)
        self._on[kind] = Alarm(kind, text, before.since if before is not None else time.time())

    def __iter__(self) -> Any:
        return iter(sorted(self._on.values(), key=lambda a: a.since))

    def to_list(self) -> list[dict[str, Any]]:
        """In JSON types, oldest first."""
        return [asdict(a) for a in self]


class Journal:
    """The latest `POINTS` points of what engines achieved, by domain."""

    def __init__(self) -> None:
        self.points: deque[dict[str, Any]] = deque(maxlen=POINTS)
        self._before: dict[str, Counts] = {}
        self._at = time.monotonic()

    def due(self) -> bool:
        """Whether it is time for another point."""
        return time.monotonic() - self._at >= EVERY_SECONDS

    def note(self, domains: dict[str, Counts], facts: dict[str, Any]) -> None:
        """Add a point: `facts`, and what each domain achieved since the last one."""
        now = time.monotonic()
        seconds, self._at = max(now - self._at, 1e-9), now
        all_, lengths, rates = Counts(), {}, {}
        for name, counts in list(domains.items()):
            part = Counts()
            part.add(counts, self._before.get(name, Counts()))
            self._before[name] = Counts(*(getattr(counts, f) for f in counts.__struct_fields__))
            all_.add(part, Counts())
            if part.length is not None:
                lengths[name] = round(part.length, 4)
            if part.rate is not None:
                rates[name] = round(part.rate, 4)
        self.points.append(
            {
                "time": round(time.time(), 3),
                "length": None if all_.length is None else round(all_.length, 4),
                "rate": None if all_.rate is None else round(all_.rate, 4),
                "tokens_per_second": round(all_.emitted / seconds, 2),
                "requests": all_.requests,
                "length_by_domain": lengths,
                "rate_by_domain": rates,
                **facts,
            }
        )
