"""Sentences that a process of the job says once."""

from __future__ import annotations

from rollspec.log_once import LogOnce

log_once = LogOnce()


def once(sentence: str) -> None:
    """Warn, unless this process has said it before; without its full stop."""
    log_once(sentence, "rollspec: %s.", sentence)
