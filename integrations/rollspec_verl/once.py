"""Sentences that a process of the job says once."""

from __future__ import annotations

from rollspec.once import Once

told = Once()


def once(sentence: str) -> None:
    """Warn, unless this process has said it before; without its full stop."""
    told(sentence, "rollspec: %s.", sentence)
