"""Faults that a job survives: what failed is left out, counted for telemetry (`rollspec/faults`), and logged once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger("rollspec")


class Faults:
    """Counts faults by cause.

    Args:
        log: takes the sentence of each cause, once; by default it is logged as an error.
    """

    def __init__(self, log: Callable[[str], None] = logger.error) -> None:
        self._counts: dict[str, int] = {}
        self._logged: set[str] = set()
        self._log = log

    def record(self, cause: str, sentence: str | None = None) -> None:
        """Count a fault, and log its sentence where it is the first that this cause has."""
        self._counts[cause] = self._counts.get(cause, 0) + 1
        if sentence is not None and cause not in self._logged:
            self._logged.add(cause)
            self._log(sentence)

    @contextmanager
    def left_out(self, what: str) -> Iterator[None]:
        """Catch and record whatever is raised inside: the caller continues without `what`."""
        try:
            yield
        except Exception as e:
            self.record(what, f"rollspec: {what} failed and is left out ({type(e).__name__}: {e}).")

    def drain(self) -> dict[str, int]:
        """Faults by cause since the last call."""
        counts, self._counts = self._counts, {}
        return counts
