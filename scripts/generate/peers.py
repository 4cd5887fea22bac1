"""Renders what `rollspec bench peers` found as `docs/peers.md`, with a figure per workload beside it."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import peer_page
from benchmarks.peer_table import summarise
from benchmarks.stale import RESULTS, ROOT
from scripts.generate import numbers, results
from scripts.generate.headline import load

FILE = ROOT / "docs" / "peers.md"


@functools.cache
def there() -> dict[str, Any]:
    """The results that there are, by name."""
    found = {name: ROOT / RESULTS / f"{name}.json" for name in peer_page.RESULTS}
    read = {name: json.loads(path.read_bytes()) for name, path in found.items() if path.is_file()}
    return {name: result | {"summary": summarise(result["turns"], result["lengths"])} for name, result in read.items()}


def render() -> str:
    """The page, which says what is stale as the others do; as it is where the history is not all here."""
    control = load("control-smollm2") or {"on_over_off": ()}
    text, stale = peer_page.render(there(), tuple(control["on_over_off"])), results.found()
    text = text.replace("\n## ", f"\n{numbers.control_line()}\n\n## ", 1)  # beside every ratio, before the first
    if stale is None:
        return FILE.read_text("utf-8") if FILE.is_file() else text
    return results.marked(text, stale) if stale else text


@dataclass
class Figure:
    """A workload's picture."""

    FILE: Path
    name: str
    workload: str

    def render(self) -> str:
        """It as SVG."""
        return peer_page.figure(self.workload, there()[self.name]["summary"]["workloads"][self.workload])


FIGURES = tuple(
    Figure(FILE.parent / peer_page.picture(name, workload), name, workload)
    for name, r in there().items()
    for workload in r["summary"]["workloads"]
)
