"""Text that every machine with Python has: the standard library's code, and the prose that documents it.

Code is the sources without docstrings and comments; prose is the docstrings, and the language reference that `help()`
shows. Both are written the same way everywhere, so one Python version gives one corpus.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

Domain = Literal["code", "prose"]
DOMAINS: tuple[Domain, ...] = ("code", "prose")

SKIPPED = ("site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "ensurepip", "turtledemo", "pydoc_data")
SHORTEST = 200  # characters of a document
CODE_BYTES, PROSE_BYTES = 1_600_000, 1_600_000
HELD_OUT = 8  # one document of so many is never trained on: prompts come from those


def documents(domain: Domain, held_out: bool) -> list[str]:
    """Documents of one domain in a fixed order, either those to train on or the others."""
    every = _code() if domain == "code" else _prose()
    return [text for text in every if (_number(text) % HELD_OUT == 0) == held_out]


@functools.cache
def _code() -> list[str]:
    return _some((_without_words(tree) for tree in _modules()), CODE_BYTES)


@functools.cache
def _prose() -> list[str]:
    def texts() -> Iterator[str]:
        from pydoc_data.topics import topics

        yield from topics.values()
        for tree in _modules():
            for node in ast.walk(tree):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    yield inspect.cleandoc(ast.get_docstring(node) or "")

    return _some(texts(), PROSE_BYTES)


def _some(texts: Iterator[str], most: int) -> list[str]:
    """Documents long enough, each once, until there are `most` characters."""
    out: dict[str, None] = {}
    size = 0
    for text in texts:
        if len(text) >= SHORTEST and text not in out:
            out[text] = None
            size += len(text)
        if size > most:
            break
    return list(out)


def _modules() -> Iterator[ast.Module]:
    """Modules in the order of a hash of their names, so that the first ones are of every kind."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = (p.relative_to(root) for p in root.rglob("*.py"))
    for name in sorted((n for n in names if not set(n.parts[:-1]) & set(SKIPPED)), key=lambda n: _number(n.as_posix())):
        try:
            yield ast.parse((root / name).read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, OSError):
            continue  # a template, or a file that this user may not read


def _without_words(tree: ast.Module) -> str:
    """The source of a module without docstrings; comments are no part of the tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
