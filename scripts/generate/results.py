"""Marks results as stale where a page names their file, and lists how current they are in `docs/benchmarks.md`."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

from scripts.stale import RESULTS, ROOT, reasons

BEGIN, END = "<!-- results: python -m scripts.generate -->", "<!-- end of results -->"
MARK = " *(stale)*"


@functools.cache
def found() -> dict[str, list[str]] | None:
    """`reasons`, once per process."""
    return reasons()


def marked(text: str, stale: dict[str, list[str]]) -> str:
    """`text` with the mark behind each mention of a stale file, and behind no other."""
    names = "|".join(re.escape(name) for name in sorted(stale, key=len, reverse=True))
    mention = re.compile(rf"(`(?:{RESULTS}/)?({names})\.json`(?:\]\([^)\s]*\))?)(?:{re.escape(MARK)})?")
    return mention.sub(lambda m: m[1] + (MARK if stale[m[2]] else ""), text)


def table(stale: dict[str, list[str]]) -> str:
    """Every result, and why it is stale."""
    lines = ["| file | measured | state |", "|---|---|---|"]
    for name, why in stale.items():
        at = re.search(r'"(?:time|began|started)": "(\d{4}-\d\d-\d\d)', (ROOT / RESULTS / f"{name}.json").read_text())
        lines.append(f"| {name} | {at[1] if at else '-'} | {'stale: ' + '; '.join(why) if why else 'current'} |")
    return "\n".join(lines)


@dataclass
class Page:
    """A page that names results."""

    FILE: Path

    def render(self) -> str:
        """The page with its marks and its table written anew; as it is where the history is not all here."""
        text, stale = self.FILE.read_text(encoding="utf-8"), found()
        if stale is None:
            return text
        head, begin, rest = marked(text, stale).partition(BEGIN)
        if not begin:
            return head
        return f"{head}{BEGIN}\n\n{table(stale)}\n\n{END}{rest.partition(END)[2]}"


PAGES = tuple(
    Page(path)
    for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("examples/*/README.md"))]
)
