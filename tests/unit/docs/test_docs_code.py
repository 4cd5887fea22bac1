"""The Python on the documentation's pages runs as written."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from rollspec.tuning import strategies, strategy  # noqa: F401 - `strategies` has all of them register

ROOT = Path(__file__).parents[3]
BLOCK = re.compile(r'^( *)```python title="(\w+\.py)"\n(.*?)^\1```', re.MULTILINE | re.DOTALL)


def blocks(page: str) -> dict[str, str]:
    """Titled Python blocks of a page of docs/."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return {title: textwrap.dedent(code) for _, title, code in BLOCK.findall(text)}


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an example registers is gone after it."""
    monkeypatch.setattr(strategy, "REGISTRY", dict(strategy.REGISTRY))


def run(*titles: str) -> None:
    code = blocks("extending.md")
    for title in titles:
        exec(compile(code[title], title, "exec"), {"__name__": title})


def test_a_drafter() -> None:
    run("drafter.py")


def test_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from drafter_online import losses

    monkeypatch.setattr(losses, "OBJECTIVES", dict(losses.OBJECTIVES))
    run("loss.py")


def test_a_strategy_and_what_the_page_says_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    run("strategy.py", "simulate.py")
    printed = capsys.readouterr().out
    assert printed and printed in (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", sorted(p.name for p in (ROOT / "docs").glob("*.md")))
def test_all_python_is_python(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    found: list[Any] = re.findall(r"^( *)```python.*?\n(.*?)^\1```", text, re.MULTILINE | re.DOTALL)
    for _, code in found:
        compile(textwrap.dedent(code), page, "exec")
