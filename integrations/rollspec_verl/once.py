"""Sentences that a process of the job says once."""

from __future__ import annotations

from rollspec.log_once import LogOnce

told = LogOnce()


def once(sentence: str) -> None:
    """Warn, unless this process has said it before; without its full stop."""
    told(sentence, "rollspec: %s.", sentence)
