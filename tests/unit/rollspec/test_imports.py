"""Imports point one way: integrations -> rollspec -> drafter_online; the pure parts know no engine and no trainer; no
module imports one that imports it, by whatever way round.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
INTEGRATIONS = {p.name for top in ("integrations", "cpu") for p in (ROOT / top).glob("rollspec_*")}
ENGINES = {"vllm", "ray", "verl", "trl", "openrlhf"}

# folder -> top-level packages that no file in it may import, wherever in the file
NEVER = {
    "drafter_online": {"rollspec", "verl", "trl", "openrlhf", "vllm", *INTEGRATIONS},
    "cpu/vllm_cpu_v2": {"rollspec", "drafter_online", *INTEGRATIONS},
    "rollspec": {"vllm_cpu_v2", *INTEGRATIONS},
    "rollspec/proposal": {"vllm", "verl", "ray"},
    "rollspec/drafting": {"vllm", "verl", "ray"},
    "rollspec/tuning": {"vllm", "verl", "ray"},
    "rollspec/head": {"vllm", "verl", "ray"},
}
# The demo is an example job: it may start the trainer's integration.
EXCEPT = {
    "rollspec/engine/vllm": (
        "rollspec/engine/vllm/v2/speculator.py",  # derives from vLLM's; imported where it is made
    ),
}
# folder -> packages that no file in it may import at module level
NOT_AT_IMPORT = {
    "rollspec/sampling": ENGINES,
    "rollspec/audit": ENGINES,
    "rollspec/proposal": ENGINES,
    "rollspec/tuning": ENGINES,
    "rollspec/telemetry": ENGINES,
    "rollspec/engine/vllm": {"vllm", "verl", "ray"},  # the plugin is loaded in processes that never build an engine
    "rollspec": {"verl", "ray"},
    "benchmarks": {"scripts"},  # a command started elsewhere would find the one that verl installs
    "examples": {"scripts"},
}

MOST_LINES = 400
SHORT = ("rollspec", "drafter_online", "integrations", "cpu", "examples", "benchmarks", "scripts", "tests")

ACYCLIC = ("rollspec", "drafter_online")


def _imports(path: Path, *, module_level: bool) -> Iterator[str]:
    """Top-level names of the packages that `path` imports, without those that only a type checker sees."""

    def walk(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if module_level and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            if isinstance(child, ast.Import):
                yield from (a.name.split(".")[0] for a in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module and not child.level:
                yield child.module.split(".")[0]
            yield from walk(child)

    return walk(ast.parse(path.read_text(encoding="utf-8"), str(path)))


def _offenders(folder: str, banned: set[str], *, module_level: bool) -> list[str]:
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(EXCEPT.get(folder, ())):
            continue
        found += [f"{name} imports {p}" for p in sorted(banned & set(_imports(path, module_level=module_level)))]
    return found


@pytest.mark.parametrize("folder", NEVER)
def test_imports_point_one_way(folder: str) -> None:
    assert _offenders(folder, NEVER[folder], module_level=False) == []


@pytest.mark.parametrize("folder", NOT_AT_IMPORT)
def test_engines_and_trainers_are_imported_where_they_are_used(folder: str) -> None:
    assert _offenders(folder, NOT_AT_IMPORT[folder], module_level=True) == []


@pytest.mark.parametrize(
    "code",
    [
        "import rollspec; rollspec.RollspecConfig.load()",
        "import rollspec.telemetry.metrics",
        "import rollspec.engine.vllm.plugin",
        "import rollspec.cli",
        "import rollspec.doctor; rollspec.doctor.examine()",
    ],
)
def test_light_imports_stay_light(code: str) -> None:
    heavy = ["torch", "vllm", "verl", "ray", "transformers", "matplotlib", "scipy", "numba"]
    check = f"{code}\nimport sys\nprint([m for m in {heavy!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60)
    assert (out.returncode, out.stdout.strip()) == (0, "[]"), out.stderr


def sources() -> dict[str, str]:
    """Source of every module, by its full name; a package goes by `package.__init__`."""
    files = (p for package in ACYCLIC for p in sorted((ROOT / package).rglob("*.py")))
    return {".".join(p.relative_to(ROOT).with_suffix("").parts): p.read_text(encoding="utf-8") for p in files}


def imports(texts: Mapping[str, str]) -> dict[str, set[str]]:
    """The modules of `texts` that each of them imports, anywhere in its source.

    `from a import b` imports module `a.b` where there is one, else package or module `a`: a submodule does not need
    what its package's `__init__` goes on to import.
    """

    def module(name: str) -> str | None:
        return next((m for m in (name, f"{name}.__init__") if m in texts), None)

    edges: dict[str, set[str]] = {}
    for name, text in texts.items():
        found: set[str | None] = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                found |= {module(a.name) for a in node.names}
            elif isinstance(node, ast.ImportFrom):
                above = name.split(".")[: -node.level] if node.level else []
                base = ".".join([*above, *([node.module] if node.module else [])])
                found |= {module(f"{base}.{a.name}") or module(base) for a in node.names}
        edges[name] = {m for m in found if m is not None and m != name}
    return edges


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        left = [start]
        while left:
            for m in edges[left.pop()] - seen:
                seen.add(m)
                left.append(m)
        return seen

    reach = {m: reached(m) for m in edges}
    found = {frozenset(n for n in reach[m] if m in reach[n]) for m in edges if m in reach[m]}
    return sorted(sorted(c) for c in found)


def test_there_are_no_circles() -> None:
    texts = sources()
    assert "rollspec.engine.vllm.plugin" in texts and "drafter_online.service" in texts
    edges = imports(texts)
    found = circles(edges)
    inner = [f"{a} -> {b}" for c in found for a in c for b in sorted(edges[a] & set(c))]
    assert not found, "modules import each other; move what they share into a leaf, or name it as a Protocol:\n" + (
        "\n".join(inner)
    )


@pytest.mark.parametrize(
    "text",
    [
        "import p.b",
        "from p import b",
        "from p.b import thing",
        "from . import b",
        "from .b import thing",
        "def f():\n    from p.b import thing",
        "if TYPE_CHECKING:\n    from p.b import Thing",
    ],
)
def test_every_way_to_import_counts(text: str) -> None:
    texts = {"p.__init__": "", "p.a": text, "p.b": "from p.c import x", "p.c": "import p.a", "p.d": "import p.a"}
    assert circles(imports(texts)) == [["p.a", "p.b", "p.c"]]


def test_a_package_that_imports_its_modules_is_a_circle_only_if_they_import_it() -> None:
    texts = {"p.__init__": "from p.a import x", "p.a": "from p import b", "p.b": ""}
    assert circles(imports(texts)) == []
    assert circles(imports(texts | {"p.a": "from p import x"})) == [["p.__init__", "p.a"]]


def test_no_test_imports_another() -> None:
    """What two share is in a module beside them: a test must not bring another file's fixtures and tests along."""
    found = []
    for folder in ("tests", "benchmarks", "examples"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                found += [f"{file.relative_to(ROOT)}: {n}" for n in names if n.rpartition(".")[2].startswith("test_")]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", SHORT)
def test_no_module_is_long(folder: str) -> None:
    lengths = {p.relative_to(ROOT).as_posix(): p.read_text().count("\n") for p in (ROOT / folder).rglob("*.py")}
    assert lengths and {name: n for name, n in lengths.items() if n > MOST_LINES} == {}
