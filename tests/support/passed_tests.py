"""Keeps when each test that the table of support names has passed last: `pytest --record` writes `tests/passed.json`.

A test that fails is taken out of it, one that is skipped or left out stays as it is. Of a test with parameters all must
pass in one run.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[1] / "passed.json"
MARK = "supports"


def update(file: Path, outcomes: dict[str, set[str]], commit: str, date: str) -> None:
    """`outcomes`: of all parts (set-up, call, tear-down; parameters) of each test."""
    known: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for test, found in outcomes.items():
        if "failed" in found:
            known.pop(test, None)
        elif "skipped" not in found:
            known[test] = {"date": date, "commit": commit}
    file.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


class Recorder:
    """Of one session; with pytest-xdist in the process that the workers report to."""

    def __init__(self) -> None:
        self.outcomes: dict[str, set[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if name := dict(report.user_properties).get(MARK):
            self.outcomes.setdefault(str(name), set()).add(report.outcome)

    def pytest_sessionfinish(self) -> None:
        if self.outcomes:
            from rollspec.machine import git_sha

            update(FILE, self.outcomes, (git_sha() or "unknown")[:8], time.strftime("%Y-%m-%d"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help=f"write which tests of the table of support passed: {FILE}")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests carry their name to where reports are read; markers do not come there."""
    if item.get_closest_marker(MARK):
        item.user_properties.append((MARK, getattr(item, "originalname", item.name)))
