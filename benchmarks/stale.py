"""Which benchmark results are stale: from a commit that is not in HEAD's history, with local changes, or older than the
code that they measure (comments and docstrings apart).

    python -m benchmarks.stale

Prints a table of the stale ones, and fails where a result does not say so itself (`"stale": true`), where a page does
not show it beside a number or prints another number than the result (`python -m scripts.generate` writes all three),
and where a page names a result that is not there. Git and JSON alone, so that the static checks stay fast. In a shallow
clone, and outside a repository, nothing can be checked: it says so and passes.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "benchmarks/results"

DRAFTING = ("rollspec/step.py", "rollspec/drafting", "rollspec/proposal", "rollspec/tuning")
BESIDE = ":(exclude)rollspec/engine/vllm/generate.py"  # makes training text: no part of an engine that is measured
COUNTS = tuple(
    f"rollspec/telemetry/{n}.py" for n in ("engine_stats", "faults", "health", "metrics", "sinks")
)  # what an engine counts
PLAIN = (*DRAFTING, *COUNTS, "rollspec/machine.py", "rollspec/sampling", "rollspec/engine", "rollspec/config",
         "cpu/vllm_cpu_v2", BESIDE)  # fmt: skip
UNTRAINED = ":(exclude)rollspec/engine/daemon.py"  # starts the head's trainer: of no concern where no arm has one
TRAINED = (*PLAIN, "configs")
ENGINE = (*TRAINED, UNTRAINED)
WITHOUT_HEAD = (  # what only an engine with a draft head or a draft model runs
    UNTRAINED,
    ":(exclude)rollspec/engine/vllm/specialists.py",
    "rollspec/config/sections.py::ModelDrafterConfig",
)
DEFAULT = (*PLAIN, "configs/default.yaml", *WITHOUT_HEAD)  # no arm has another preset, or a head
HEAD = ("rollspec/head", "drafter_online")
TEACHER = "integrations/rollspec_verl/teacher.py"  # of `drafter.mode: policy` alone
JOB = (
    "integrations/rollspec_verl",
    f":(exclude){TEACHER}",
    "cpu/rollspec_verl_cpu",
    "examples/grpo_arithmetic",
    "examples/demo/job.py",
)
RESUME = (
    *(f"rollspec/engine/operations.py::{name}" for name in ("_save", "_load", "_load_tuning")),
    "integrations/rollspec_verl/trainer.py::load",
)
"""Functions that no result measures: what a job saves and takes up again."""
REPEATS = ("rollspec/sampling", "rollspec/engine/vllm", "examples/grpo_arithmetic", "examples/demo/job.py")
DEMO = (*DEFAULT, *JOB, "examples/demo/sampler.py")
TRAINING = tuple(
    f"drafter_online/{n}.py"
    for n in ("attention", "head", "initial_weights", "losses", "model", "objective", "optimizer", "packing", "trainer")
)

MEASURES: dict[str, tuple[str, ...]] = {
    "audit_power": ("rollspec/audit",),
    "audit-smollm2": (*DEFAULT, "rollspec/audit"),
    "bandits": ("rollspec/tuning",),
    "control": DEFAULT,
    "control-head": (*TRAINED, *HEAD),
    "control-smollm2": DEFAULT,
    "cost": (*DEFAULT, "benchmarks/cost.py"),
    "gpu": (*ENGINE, *TRAINING, "benchmarks/gpu"),
    "demo-0.32": DEMO,
    "demo-pairs": DEMO,
    "drafter": ("drafter_online",),
    "drafter-replicas": (*TRAINING, "drafter_online/buffer.py", "drafter_online/samples.py"),
    "draws": TRAINING,
    "harm": DEFAULT,
    "harm-smollm2": DEFAULT,
    "head": (*TRAINED, *HEAD, "examples/grpo_tasks"),
    "head-earlier": (*TRAINED, *HEAD, "examples/grpo_tasks"),
    "head-passes": (*TRAINED, *HEAD, "examples/grpo_tasks"),
    "identity-bfloat16": ("rollspec/sampling", "rollspec/engine/vllm", "cpu/vllm_cpu_v2"),
    "inert": ("rollspec/engine/vllm",),
    "lengths": DEFAULT,
    "lengths-again": DEFAULT,
    "long_tail": (*TRAINED, *JOB, *HEAD),
    "make-head-smollm2": (*TRAINING, "drafter_online/make_head.py"),
    "make-head-tasks": (*TRAINING, "drafter_online/make_head.py"),
    "moving": (*TRAINING, "examples/demo/job.py", "examples/grpo_tasks"),
    "moving-terms": (*TRAINING, "examples/demo/job.py", "examples/grpo_tasks"),
    "peers": (*TRAINED, *HEAD),
    "peers-trained": (*TRAINED, *HEAD),
    "peers-published": (*TRAINED, *HEAD),
    "peers-further": (*TRAINED, *HEAD),
    "peers-rules": ENGINE,
    "peers-demo": ENGINE,  # none of its arms has a head
    "propose": DRAFTING,
    "recipes": TRAINING,
    "repeats": REPEATS,
    "repeats-float32": REPEATS,
    "replay": ENGINE,
    "reuse": (*TRAINED, *JOB),
    "runners": ("cpu/vllm_cpu_v2",),
    "scale": ("benchmarks/scale", "drafter_online/canary.py", "drafter_online/release.py"),
    "serve": (*TRAINED, *HEAD),
    "swap": ("rollspec/head", "rollspec/engine/vllm"),
    "traffic": (*TRAINED, *HEAD, "examples/production_traffic"),
    "traffic-smollm2": (*TRAINED, *HEAD, "examples/production_traffic"),
    "teachers-earlier": (*TRAINED, *HEAD, "integrations/rollspec_verl", "examples/demo/job.py"),
    "teachers": (*TRAINED, *HEAD, "integrations/rollspec_verl", "examples/demo/job.py"),
    "training-smollm2": TRAINING,
    "tuner": DEFAULT,
    "tuner-steady": DEFAULT,
    "tuner-steady-smollm2": DEFAULT,
}
"""What each file of `benchmarks/results` measures, by its name without `.json`: paths from the root, as git takes them;
`FILE::NAME` leaves one class or function of a file out.
"""


def reasons(root: Path = ROOT) -> dict[str, list[str]] | None:
    """Why each result is stale, by name; an empty list where it is not. None where the history is not all here.

    Raises:
        ValueError: a result is not in `MEASURES`.
    """
    if _git(root, "rev-parse", "--is-shallow-repository") != "false":
        return None
    known: dict[tuple[str, ...], list[str]] = {}
    found = {}
    for path in sorted((root / RESULTS).glob("*.json")):
        if path.stem not in MEASURES:
            raise ValueError(
                f"{RESULTS}/{path.name} has no line in MEASURES of benchmarks/stale.py: add what it measures."
            )
        marks = sorted(set(_revisions(json.loads(path.read_bytes()))))
        why = [] if marks else ["it names no commit"]
        for commit, dirty in marks:
            ask = (commit, *MEASURES[path.stem])
            if ask not in known:
                known[ask] = _of_commit(root, commit, MEASURES[path.stem])
            why += [r for r in [*known[ask], *(["the tree had local changes"] if dirty else [])] if r not in why]
        found[path.stem] = why
    return found


def _of_commit(root: Path, commit: str, paths: tuple[str, ...]) -> list[str]:
    if _git(root, "merge-base", "--is-ancestor", commit, "HEAD") is None:
        return [f"{commit[:8]} is not in this history"]
    return [f"what it measures changed since {commit[:8]}"] if changed(root, commit, paths) else []


def changed(root: Path, commit: str, paths: tuple[str, ...]) -> bool:
    """Whether the code in `paths` is another one than at `commit`; or that is not known, as in no repository."""
    # Against the working tree: the commit that changes a module also changes what the pages say of its numbers.
    files = _git(root, "diff", "--name-only", commit, "--", *(p for p in paths if "::" not in p))
    if files is None:
        return True
    apart: dict[str, set[str]] = defaultdict(set)
    for file, _, name in (p.partition("::") for p in (*paths, *RESUME) if "::" in p):
        apart[file].add(name)
    return any(
        _code(_git(root, "show", f"{commit}:{file}"), apart[file]) != _code(_read(root / file), apart[file])
        for file in files.splitlines()
        if not file.endswith(".md")  # a page says what was measured
    )


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None


def _code(text: str | None, apart: set[str]) -> str | None:
    """What of a file decides what is measured: of Python, neither comments nor docstrings nor layout, nor `apart`."""
    try:
        tree = ast.parse(text or "")
    except (SyntaxError, ValueError):
        return text
    tree.body = [n for n in tree.body if not (isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name in apart)]
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            body[0] = ast.Pass()
    return text and ast.dump(tree)


def _revisions(data: Any) -> Iterator[tuple[str, bool]]:
    """Every (commit, whether there were local changes) that a result names, wherever in it."""
    if isinstance(data, dict):
        # `commits`: of the jobs, where a result was made from some that had run before.
        for commit in (data.get("git") or data.get("git_sha"), *data.get("commits", ())):
            if isinstance(commit, str):
                yield commit.split()[0], bool(data.get("dirty")) or " " in commit
        data = list(data.values())
    if isinstance(data, list):
        for value in data:
            if isinstance(value, dict | list):
                yield from _revisions(value)


def _git(root: Path, *args: str) -> str | None:
    """What git prints; None where it fails, or is not there."""
    try:
        done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, timeout=60, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def main() -> int:
    """Print what is stale; the exit status."""
    from scripts.generate import results

    found = reasons()
    if found is None:
        print("The whole history is not here: which results are stale cannot be checked.")
        return 0
    for name, why in found.items():
        if why:
            print(f"{name + '.json':24}stale: {'; '.join(why)}")
    print(f"{sum(map(bool, found.values()))} of {len(found)} results are stale.")
    wrong = [
        f"{page.FILE} does not say what is stale, or prints other numbers than the results; run "
        "`python -m scripts.generate`."
        for page in results.PAGES
        if page.FILE.read_text("utf-8") != page.render()
    ]
    wrong += [
        f"{page.FILE} names {RESULTS}/{name}.json, which is not there."
        for page in results.PAGES
        for name in results.unknown(page.FILE.read_text("utf-8"))
    ]
    for line in wrong:
        print(line, file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
