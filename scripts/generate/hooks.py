"""Renders the registry as the tables of `docs/extending.md`, between the two marks there."""

from __future__ import annotations

from pathlib import Path

from rollspec.engine.vllm.hooks import HOOKS
from scripts.vllm_uses import USES

FILE = Path(__file__).resolve().parents[2] / "docs" / "extending.md"
BEGIN, END = "<!-- hooks: python -m scripts.generate -->", "<!-- end of hooks -->"


def tables() -> str:
    """The hooks in the order in which they are applied, and what is used without being changed."""
    lines = ["| in vLLM | by | vLLM | why | goes when |", "|---|---|---|---|---|"]
    for h in HOOKS:
        module, _, path = h.targets[0].partition(":")
        by = ", ".join(f"`{m}.py`" for m in h.by)
        where = f"`{path}` of `{module.removeprefix('vllm.')}`"
        versions = ("any" if h.versions == ">=0" else f"`{h.versions}`") + (", CPU" if h.cpu_only else "")
        why = h.why + (" (outputs depend on it)" if h.correctness else "")
        lines.append(f"| {where} | {by} | {versions} | {why} | {h.removal} |")
    lines += ["", "What is called, read or derived from, and not changed:", ""]
    lines += ["| file in `rollspec/engine/vllm/` | uses of vLLM |", "|---|---|"]
    for file, targets in USES.items():
        names = ", ".join(f"`{t.partition(':')[2]}`" for t in targets)
        lines.append(f"| `{file}` | {names} |")
    return "\n".join(lines)


def render() -> str:
    """The page with its tables written anew."""
    head, _, rest = FILE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{tables()}\n\n{END}{tail}"
