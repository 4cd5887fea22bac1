"""Stand-ins that play an object of an installed package, with only names of the class they play.

    request = like("vllm.v1.core.sched.output:NewRequestData", req_id="a", prefill_token_ids=[1, 2])

A test with a stand-in passes whatever the real class looks like. So `like` looks every name up in the source of the
class and of its bases within the package, and refuses one that is not there: an upgrade that renames or removes an
attribute fails the test. The source is parsed, not imported: importing vLLM takes seconds. Without the package nothing
is checked.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def like(cls: str, /, **attributes: Any) -> Any:
    """An object with exactly these attributes that plays an instance of `cls`, "package.module:Class".

    Raises AssertionError where the package is installed and its class has no attribute of such a name.
    """
    check(cls, *attributes)
    return SimpleNamespace(**attributes)


def check(cls: str, /, *names: str) -> None:
    """Refuse names that instances of `cls`, "package.module:Class", do not have: what a hand-written class plays."""
    module, _, name = cls.partition(":")
    if folder(module.partition(".")[0]) is None:
        return
    known, file = attributes_of(module, name)
    for wanted in names:
        assert wanted in known, f"{name} has no attribute {wanted!r}: {file}"


def attributes_of(module: str, name: str) -> tuple[frozenset[str], Path]:
    """The names that instances of the class have, and the file that defines it."""
    found = definition(module, name)
    assert found is not None, f"no class {name!r} in module {module}: {_file(module)}"
    module, node = found
    file = _file(module)
    assert file is not None
    return _names(module, node.name), file


@functools.cache
def folder(package: str) -> Path | None:
    """Where a package is installed; None where it is not. It is not imported, nor read from `sys.modules`, where a test
    may have put something else in its place.
    """
    for finder in sys.meta_path:
        spec = finder.find_spec(package, None)
        if spec is not None and spec.submodule_search_locations:
            return Path(next(iter(spec.submodule_search_locations)))
    return None


@functools.cache
def _names(module: str, name: str) -> frozenset[str]:
    """Fields, annotations, class attributes, methods, properties and what methods assign to, its bases' too."""
    found = definition(module, name)
    if found is None:
        return frozenset()
    module, node = found
    names = set(_own(node))
    for base in node.bases:
        names |= _base(module, base.value if isinstance(base, ast.Subscript) else base)
    return frozenset(names)


def _own(node: ast.ClassDef) -> Iterator[str]:
    for statement in _statements(node.body):
        if isinstance(statement, Definition):
            yield statement.name
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _assigned(statement)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            yield from (n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name))


def _assigned(method: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """`x` of each `self.x = ...`."""
    first = next((a.arg for a in (*method.args.posonlyargs, *method.args.args)), None)
    for node in ast.walk(method):
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
            continue
        if isinstance(node.value, ast.Name) and node.value.id == first:
            yield node.attr


def _base(module: str, base: ast.expr) -> frozenset[str]:
    if isinstance(base, ast.Name):
        return _names(module, base.id)
    if isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name):
        where = parsed(module).modules.get(base.value.id)
        return _names(where, base.attr) if where else frozenset()
    return frozenset()


def definition(module: str, name: str) -> tuple[str, ast.ClassDef] | None:
    """The class and the module that defines it, found through imports; None outside the module's package."""
    for _ in range(10):
        if _file(module) is None:
            return None
        tree = parsed(module)
        if name in tree.classes:
            return module, tree.classes[name]
        if name not in tree.imported:
            return None
        origin, name = tree.imported[name]
        if origin.partition(".")[0] != module.partition(".")[0]:
            return None
        module = origin
    return None


@dataclass
class Parsed:
    """What a module's source defines: its classes, names from other modules, and aliases of modules."""

    classes: dict[str, ast.ClassDef]
    imported: dict[str, tuple[str, str]]
    modules: dict[str, str]


@functools.cache
def parsed(module: str) -> Parsed:
    """The module's classes and imports, from its source."""
    file = _file(module)
    assert file is not None, f"no module {module}"
    out = Parsed({}, {}, {})
    for node in _statements(ast.parse(file.read_bytes()).body):
        if isinstance(node, ast.ClassDef):
            out.classes[node.name] = node
        elif isinstance(node, ast.Import):
            out.modules |= {a.asname or a.name: a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                parts = module.split(".")[: None if file.name == "__init__.py" else -1]
                origin = ".".join(parts[: len(parts) - node.level + 1] + ([node.module] if node.module else []))
            for a in node.names:
                out.imported[a.asname or a.name] = (origin, a.name)
                out.modules[a.asname or a.name] = f"{origin}.{a.name}"
    return out


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module or class, also under its `if`, `try` and `with`."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


@functools.cache
def _file(module: str) -> Path | None:
    package, *parts = module.split(".")
    top = folder(package)
    if top is None:
        return None
    path = top.joinpath(*parts)
    return next((p for p in (path / "__init__.py", path.with_name(path.name + ".py")) if p.is_file()), None)
