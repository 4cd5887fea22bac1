"""Numbers of results as cells of a page's tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

COUNTS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
Cells = tuple[str, str]
"""A number, and its interval."""


def origin_of(d: Any) -> str:
    """Processor, day and commit of a result; of a job's, those of the run with rollspec."""
    made = d["provenance"]
    made = made.get("rollspec", made)
    machine, commit = made.get("machine", made), made.get("git") or made["git_sha"]
    cpu = re.sub(r"\((?:R|TM)\)| CPU| Processor| @.*", "", str(machine["cpu"])).strip()
    return f"{cpu}, {machine['cores']} cores, {(made.get('time') or made['started'])[:10]}, {commit[:8]}"


def ratio_of(r: Any) -> Cells:
    """Of a ratio with its interval."""
    return f"{r['value']:.2f}x", f"{r['low']:.2f}-{r['high']:.2f}"


def median_of(r: Any) -> Cells:
    """Of a median with its interval, which one pair has not."""
    return f"{r['median']:.2f}x", "one pair" if r.get("n") == 1 else f"{r['low']:.2f}-{r['high']:.2f}"


def speed_of(r: Any) -> Cells:
    """Of a ratio of times."""
    return f"{1 / r['median']:.2f}x", f"{1 / r['high']:.2f}-{1 / r['low']:.2f}"


def time_of(r: Any) -> Cells:
    """Of a ratio of times, as it is."""
    return f"{r['median']:.2f}", f"{r['low']:.2f}-{r['high']:.2f}"


def span(values: Sequence[float]) -> str:
    """The least and the greatest, or the one."""
    low, high = f"{min(values):.0f}", f"{max(values):.0f}"
    return low if low == high else f"{low} to {high}"


def count_of(n: int) -> str:
    """A small number in words."""
    return COUNTS[n] if n < len(COUNTS) else str(n)


def listed(values: Sequence[float], form: str) -> str:
    """Numbers in a sentence."""
    *most, last = (f"{v:{form}}" for v in values)
    return f"{', '.join(most)} and {last}" if most else last


def joined(cells: Iterable[Cells]) -> Cells:
    """Several numbers in one cell, and their intervals in another."""
    values, intervals = zip(*cells, strict=True)
    return " / ".join(values), " / ".join(intervals)


def both(cells: Cells) -> str:
    """A number with its interval."""
    return f"{cells[0]} ({cells[1]})"


def percent(share: float | None, digits: int = 0) -> str:
    """A share, or that there is none."""
    return "-" if share is None else f"{100 * share:.{digits}f} %"


def name_of(what: str) -> str:
    """Without the folders that it lies in, where it is a path."""
    return Path(what).name if what.startswith("/") else what


def table_of(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
