"""Imported by the server that engine cores are forked from (forked.py), and by nothing else."""

from __future__ import annotations

import forked

forked.patch()
