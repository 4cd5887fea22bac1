"""`rollspec drafter`: the `drafter-online` command under rollspec's name, as in `rollspec drafter init --target MODEL`."""

from __future__ import annotations

from drafter_online.cli import app as command

__all__ = ["command"]
