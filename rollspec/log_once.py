"""Warnings that are logged once: a cause that recurs at every step must not fill the log."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("rollspec")


class LogOnce:
    """Log lines by key: the first of a key at its level, later ones at DEBUG."""

    def __init__(self) -> None:
        self.logged: set[str] = set()

    def __call__(self, key: str, message: str, *args: Any, level: int = logging.WARNING) -> None:
        """Log `message % args` under `key`."""
        logger.log(logging.DEBUG if key in self.logged else level, message, *args, stacklevel=2)
        self.logged.add(key)

    def warn(self, sentence: str) -> None:
        """Warn `rollspec: <sentence>.`, with the sentence as its key."""
        self(sentence, "rollspec: %s.", sentence)
