"""`scripts/test.sh` counts what ran, what was skipped, and what was left out."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts/test.sh"


@pytest.mark.parametrize(
    ("line", "word", "number"),
    [
        ("3 passed, 2 skipped, 4 deselected, 1 warning in 1.00s", "deselected", "4"),
        ("3 passed, 2 skipped in 1.00s", "deselected", "0"),
        ("= 1 failed, 12 passed, 2 errors in 1.00s =", "passed", "12"),
        ("7 deselected in 0.1s", "deselected", "7"),
        ("no tests ran in 0.1s", "passed", "0"),
    ],
)
def test_the_closing_line_is_counted(tmp_path: Path, line: str, word: str, number: str) -> None:
    function = re.search(r"^count\(\).*?^}", SCRIPT.read_text(), re.M | re.S)
    assert function is not None
    (tmp_path / "log").write_text(f"4 passed in a test's own output\n{line}\n")
    command = f"{function[0]}\ncount {word} {tmp_path / 'log'}"
    assert subprocess.run(["bash", "-c", command], capture_output=True, text=True).stdout.strip() == number


def test_left_out_tests_are_counted_with_several_workers(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_one(): ...\ndef test_two(): ...\ndef test_three(): ...\n")
    (tmp_path / "conftest.py").write_text((SCRIPT.parents[1] / "tests/conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\naddopts = -q\npythonpath = {SCRIPT.parents[1] / 'tests/support'}\n"
    )
    for workers in ([], ["-n", "2"]):
        command = [sys.executable, "-m", "pytest", "-k", "one", *workers, "-p", "no:cacheprovider", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0 and "1 passed, 2 deselected" in done.stdout, done.stdout
