"""Stand-ins that play an object of an installed package, with only names of the class they play.

    request = like("vllm.v1.core.sched.output:NewRequestData", req_id="a", prefill_token_ids=[1, 2])
    queue = like("transfer_queue", kv_batch_get=lambda keys, partition_id, select_fields: data)     # a module

A test with a stand-in passes whatever the real class looks like. So `like` looks every name up in the source of the
class and of its bases within the package, and refuses one that is not there: an upgrade that renames or removes an
attribute fails the test. A function in the place of a method is held to its parameters (`stand_in_calls.py`). The
source is parsed, not imported: importing vLLM takes seconds. Without the package nothing is checked.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, TypeVar

from stand_in_calls import differs

Class = TypeVar("Class", bound=type)
Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = ast.ClassDef | Function


def like(cls: str, /, **attributes: Any) -> Any:
    """An object with exactly these attributes that plays an instance of `cls`, "package.module:Class", or a module.

    Raises AssertionError where the package is installed and its class has no attribute of such a name, or its method
    has other parameters.
    """
    check(cls, *attributes)
    for name, value in attributes.items():
        if isinstance(value, FunctionType | MethodType):
            _check_call(cls, name, value, is_method=False)
    return SimpleNamespace(**attributes)


def plays(cls: str, *own: str) -> Callable[[Class], Class]:
    """A decorator: the class that it is on plays `cls`, "package.module:Class"; as `like`, for what it defines but the
    names `own`.
    """

    def checked(stand_in: Class) -> Class:
        given = {n: value for n, value in vars(stand_in).items() if not n.startswith("__") and n not in own}
        check(cls, *given)
        for name, value in given.items():
            if isinstance(value, FunctionType):
                _check_call(cls, name, value, is_method=True)
        return stand_in

    return checked


def check(cls: str, /, *names: str) -> None:
    """Refuse names that instances of `cls`, "package.module:Class", or a module do not have."""
    module, _, name = cls.partition(":")
    if folder(module.partition(".")[0]) is None:
        return
    known, file = attributes_of(module, name) if name else (_names_of_module(module), _file(module))
    for wanted in names:
        assert wanted in known, f"{name or module} has no attribute {wanted!r}: {file}"


def _check_call(cls: str, attribute: str, stand_in: FunctionType | MethodType, is_method: bool) -> None:
    module, _, name = cls.partition(":")
    if folder(module.partition(".")[0]) is None:
        return
    real = _method(module, name, attribute) if name else _function(module, attribute)
    if real is None:
        return  # no function there: a property, or an attribute that holds one
    static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in real.decorator_list)
    found = differs(stand_in, real, is_method, bool(name) and not static)
    assert found is None, f"{name or module}.{attribute} {found}: {_file(module)}"


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
        where = _base_of(module, base.value if isinstance(base, ast.Subscript) else base)
        names |= _names(*where) if where is not None else frozenset()
    return frozenset(names)


def _method(module: str, name: str, attribute: str) -> Function | None:
    """The function that the class, or the first of its bases that has one, defines; the last of overloads."""
    found = definition(module, name)
    if found is None:
        return None
    module, node = found
    for statement in reversed([*_statements(node.body)]):
        if isinstance(statement, Function) and statement.name == attribute:
            kinds = {d.id for d in statement.decorator_list if isinstance(d, ast.Name)}
            return None if kinds & {"property", "cached_property"} else statement
    for base in node.bases:
        where = _base_of(module, base.value if isinstance(base, ast.Subscript) else base)
        if where is not None and (method := _method(*where, attribute)) is not None:
            return method
    return None


def _function(module: str, name: str) -> Function | None:
    """The function that a module defines or imports within its package."""
    for _ in range(10):
        if _file(module) is None:
            return None
        tree = parsed(module)
        if name in tree.functions:
            return tree.functions[name]
        if name not in tree.imported or tree.imported[name][0].partition(".")[0] != module.partition(".")[0]:
            return None
        module, name = tree.imported[name]
    return None


def _names_of_module(module: str) -> frozenset[str]:
    file = _file(module)
    assert file is not None, f"no module {module}"
    tree = parsed(module)
    inside = {p.stem for p in file.parent.iterdir()} if file.name == "__init__.py" else set()
    return frozenset({*tree.classes, *tree.functions, *tree.imported, *tree.modules, *tree.assigned, *inside})


def _own(node: ast.ClassDef) -> Iterator[str]:
    for statement in _statements(node.body):
        if isinstance(statement, Definition):
            yield statement.name
        if isinstance(statement, Function):
            yield from _assigned(statement)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            yield from (n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name))


def _assigned(method: Function) -> Iterator[str]:
    """`x` of each `self.x = ...`."""
    first = next((a.arg for a in (*method.args.posonlyargs, *method.args.args)), None)
    for node in ast.walk(method):
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
            continue
        if isinstance(node.value, ast.Name) and node.value.id == first:
            yield node.attr


def _base_of(module: str, base: ast.expr) -> tuple[str, str] | None:
    """Module and name of a base class."""
    if isinstance(base, ast.Name):
        return module, base.id
    if isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name):
        where = parsed(module).modules.get(base.value.id)
        return (where, base.attr) if where else None
    return None


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
    """What a module's source defines: its classes, functions and other names, names from other modules, and aliases of
    modules.
    """

    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    assigned: set[str] = field(default_factory=set)
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)


@functools.cache
def parsed(module: str) -> Parsed:
    """The module's classes and imports, from its source."""
    file = _file(module)
    assert file is not None, f"no module {module}"
    out = Parsed()
    for node in _statements(ast.parse(file.read_bytes()).body):
        if isinstance(node, ast.ClassDef):
            out.classes[node.name] = node
        elif isinstance(node, Function):
            out.functions[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            out.assigned |= {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
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
