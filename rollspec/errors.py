"""The errors a user can meet. Each message is one sentence: which field or file, which value, what to do."""

from __future__ import annotations


class RollspecError(Exception):
    """Base of everything rollspec raises on purpose."""


class ConfigError(RollspecError, ValueError):
    """A configuration key or value that cannot be used."""


class HistoryError(RollspecError):
    """A history folder or file that cannot be read or written."""


class UnsupportedEngineError(RollspecError):
    """An engine version, model or setting that rollspec does not accelerate."""
