"""`rollspec drafter`: the command `drafter-online` under this name (`rollspec drafter init --target MODEL`)."""

from __future__ import annotations

from drafter_online.cli import app as command

__all__ = ["command"]
