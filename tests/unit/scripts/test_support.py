"""The table of support: what a mark may say, that only what passed is named, and that the pages hold it."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import passed_tests
import pytest

from scripts.generate import support

TEXT = """
import pytest

@pytest.mark.supports("verl", "sync", "drafts", "metrics")
@pytest.mark.slow
def test_one(): ...

@pytest.mark.supports("verl", "sync", "drafts")
@pytest.mark.supports("TRL", "server", "resume")
async def test_two(): ...

def test_three(): ...
"""


def test_marks_are_read_from_the_text() -> None:
    found = {(m.test, m.row, m.columns, m.slow) for m in support.marks(TEXT, "x.py")}
    assert found == {
        ("test_one", ("verl", "sync"), ("drafts", "metrics"), True),
        ("test_two", ("verl", "sync"), ("drafts",), False),
        ("test_two", ("TRL", "server"), ("resume",), False),
    }


def test_a_module_of_slow_tests_is_slow() -> None:
    text = TEXT.replace("import pytest\n", "import pytest\n\npytestmark = [pytest.mark.e2e, pytest.mark.slow]\n")
    assert all(m.slow for m in support.marks(text, "x.py"))


@pytest.mark.parametrize("args", ['"verl", "async", "drafts"', '"verl", "sync", "speed"', '"verl", "sync"'])
def test_a_mark_outside_the_table_is_an_error(args: str) -> None:
    with pytest.raises(ValueError, match=r"x\.py: test_one supports verl"):
        list(support.marks(f"@pytest.mark.supports({args})\ndef test_one(): ...", "x.py"))


def test_a_test_that_has_not_passed_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "passed.json"
    ran = {"test_grpo_with_trl": {"passed"}, "test_colocate_async": {"passed", "failed"}, "test_other": {"skipped"}}
    passed_tests.update(file, {"test_colocate_async": {"passed"}}, "1234abcd", "2026-01-02")
    passed_tests.update(file, ran, "5678abcd", "2026-02-03")
    assert json.loads(file.read_text()) == {"test_grpo_with_trl": {"date": "2026-02-03", "commit": "5678abcd"}}
    monkeypatch.setattr(support, "PASSED", file)
    assert set(support.table().split("`")[1::2]) == {"test_grpo_with_trl"}
    assert "`test_grpo_with_trl`, 2026-02-03" in support.table()


def test_pages_name_tests_that_are_there() -> None:
    table = support.table()
    for page in support.PAGES:
        assert support.table(page.names) in page.FILE.read_text(), "run `python -m scripts.generate`"
    tests = {
        node.name
        for path in (support.ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    plain = support.table(names=False)
    cells = [cell.strip() for line in plain.splitlines()[2:] for cell in line.strip("|").split("|")[2:]]
    assert len(cells) == len(support.ROWS) * len(support.COLUMNS) and set(cells) == {"yes", support.NOT_RUN}
    listed = table.splitlines()[-1]
    assert set(listed.split("`")[1::2]) <= tests
    assert sum(f"| ({n}) " in table for n in range(1, listed.count(" · ") + 2)) == listed.count(" · ") + 1
