"""Says which results are stale, in the result itself (`"stale": true`) and on every page where it names the file.

Writes the tables of the pages that come from results, too (`scripts/generate/numbers.py`).
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

from benchmarks.stale import RESULTS, ROOT, reasons
from scripts.generate import numbers

MARK = " *(stale)*"
BLOCK = re.compile(r"(<!-- results: (\S+) -->\n).*?(<!-- end of results -->)", re.DOTALL)
INLINE = re.compile(r"(<!-- number: (\S+) -->).*?(<!-- end of number -->)", re.DOTALL)
FLAG = re.compile(r'\A(\{\s*)"stale": (?:true|false),\s*')
NAMED = re.compile(rf"{RESULTS}/([a-z0-9_.-]+)\.json")


@functools.cache
def found() -> dict[str, list[str]] | None:
    """`reasons`, once per process."""
    return reasons()


def marked(text: str, stale: dict[str, list[str]]) -> str:
    """`text` with the mark behind each mention of a stale file, and behind no other."""
    names = "|".join(re.escape(name) for name in sorted(stale, key=len, reverse=True))
    mention = re.compile(rf"(`(?:{RESULTS}/)?({names})\.json`(?:\]\([^)\s]*\))?)(?:{re.escape(MARK)})?")
    return mention.sub(lambda m: m[1] + (MARK if stale[m[2]] else ""), text)


def flagged(text: str, stale: bool) -> str:
    """A result's JSON with `"stale": true` as its first entry, or without one; nothing else of it is touched."""
    plain = FLAG.sub(r"\1", text)
    return re.sub(r"\A\{(\s*)", r'{\1"stale": true,\1', plain) if stale else plain


def unknown(text: str) -> list[str]:
    """Files of benchmarks/results that `text` names and that are not there."""
    return sorted({name for name in NAMED.findall(text) if not (ROOT / RESULTS / f"{name}.json").is_file()})


def table(stale: dict[str, list[str]]) -> str:
    """Every result, and why it is stale."""
    lines = ["| file | measured | state |", "|---|---|---|"]
    for name, why in stale.items():
        at = re.search(r'"(?:time|began|started)": "(\d{4}-\d\d-\d\d)', (ROOT / RESULTS / f"{name}.json").read_text())
        lines.append(f"| {name} | {at[1] if at else '-'} | {'stale: ' + '; '.join(why) if why else 'current'} |")
    return "\n".join(lines)


def block(name: str, stale: dict[str, list[str]]) -> str:
    """What stands between `<!-- results: NAME -->` and `<!-- end of results -->`.

    Raises:
        KeyError: there is no such block.
    """
    return table(stale) if name == "state" else numbers.BLOCKS[name]()


@dataclass
class Page:
    """A page that names results."""

    FILE: Path

    def render(self) -> str:
        """The page with its tables and marks written anew; as it is where the history is not all here."""
        text, stale = self.FILE.read_text(encoding="utf-8"), found()
        if stale is None:
            return text
        text = BLOCK.sub(lambda m: f"{m[1]}\n{self._here(block(m[2], stale))}\n\n{m[3]}", text)
        text = INLINE.sub(lambda m: f"{m[1]}{self._here(numbers.INLINE[m[2]]())}{m[3]}", text)
        return marked(text, stale)

    def _here(self, text: str) -> str:
        """`text` with links from this page's folder; they are written as from the root."""
        return text.replace("](docs/", "](") if self.FILE.parent == ROOT / "docs" else text


@dataclass
class Result:
    """A file of benchmarks/results."""

    FILE: Path

    def render(self) -> str:
        """The result with or without `"stale": true`; as it is where the history is not all here."""
        text, stale = self.FILE.read_text(encoding="utf-8"), found()
        return text if stale is None else flagged(text, bool(stale[self.FILE.stem]))


PAGES: tuple[Result | Page, ...] = (
    *(Result(path) for path in sorted((ROOT / RESULTS).glob("*.json"))),
    *(
        Page(path)
        for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("examples/*/README.md"))]
    ),
)
