"""Imports point one way: integrations -> rollspec -> drafter_online; the pure parts know no engine and no trainer."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INTEGRATIONS = {p.name for p in (ROOT / "integrations").glob("rollspec_*")}
ENGINES = {"vllm", "ray", "verl", "trl", "openrlhf"}

# folder -> top-level packages that no file in it may import, wherever in the file
NEVER = {
    "drafter_online": {"rollspec", "verl", "trl", "openrlhf", "vllm", *INTEGRATIONS},
    "rollspec": INTEGRATIONS,
    "rollspec/proposal": {"vllm", "verl", "ray"},
    "rollspec/drafting": {"vllm", "verl", "ray"},
    "rollspec/tuning": {"vllm", "verl", "ray"},
}
# The demo is an example job: it may start the trainer's integration.
EXCEPT = {
    "rollspec": ("rollspec/demo/", "rollspec/bench_cli.py"),
    "rollspec/engine/vllm": (
        "rollspec/engine/vllm/scheduler.py",  # vLLM is told its name
        "rollspec/engine/vllm/v2/speculator.py",  # derives from vLLM's; imported where it is made
    ),
}
# folder -> packages that no file in it may import at module level
NOT_AT_IMPORT = {
    "rollspec/sampling": ENGINES,
    "rollspec/proposal": ENGINES,
    "rollspec/tuning": ENGINES,
    "rollspec/telemetry": ENGINES,
    "rollspec/engine/vllm": {"vllm", "verl", "ray"},  # the plugin is loaded in processes that never build an engine
    "rollspec": {"verl", "ray"},
}


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
