"""Writes every generated file of docs/, or with `--check` names those that are out of date.

python -m scripts.generate
python -m scripts.generate --check
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from scripts.generate import configuration, grafana, hooks, metrics, peers, results, support, wandb_workspace


class Page(Protocol):
    """A file that is generated, whole or in part."""

    FILE: Path

    def render(self) -> str:
        """What it should hold."""


PAGES: tuple[Page, ...] = (
    configuration, metrics, hooks, grafana, wandb_workspace, peers, *peers.FIGURES, *results.PAGES, *support.PAGES,
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Write or check them; the exit status."""
    stale = [page for page in PAGES if not page.FILE.is_file() or page.FILE.read_text("utf-8") != page.render()]
    for page in stale:
        if "--check" in argv:
            print(f"{page.FILE} is out of date; run `python -m scripts.generate`.", file=sys.stderr)
        else:
            page.FILE.write_text(page.render(), encoding="utf-8")
            print(page.FILE)
    return int("--check" in argv and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
