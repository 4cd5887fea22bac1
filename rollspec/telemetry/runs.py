"""Reads a run folder: `metrics.jsonl` (one object per training step) and `run.json` (where the run came from); or, in
place of the first, TRL's `trainer_state.json`.

    run = load_run("runs/latest/rollspec")
    run.series("timing_s/gen")        # [11.2, 9.8, None, ...], one entry per step

Two line formats are read: flat metric names, and verl's `file` logger, `{"step": 3, "data": {...}}`. What was not
measured stays None: the report says what is missing instead of showing zeros.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rollspec.errors import RollspecError

METRICS = "metrics.jsonl"
PROVENANCE = "run.json"
STEP = "training/global_step"
EPOCH = "training/epoch"
LENGTHS_FILE = "lengths.jsonl"
REPEATS = "repeats.json"
GEN, STEP_TIME = "timing_s/gen", "timing_s/step"

TRAINER_STATE = "trainer_state.json"
"""Of transformers' trainers: `log_history` holds what was logged."""

ALIASES = {
    "global_step": STEP,
    "rollspec/rollout/generation_seconds": GEN,
    "step_time": STEP_TIME,
    "completions/mean_length": "response_length/mean",
    "completions/max_length": "response_length/max",
    "completions/clipped_ratio": "response_length/clip_ratio",
    "reward": "critic/rewards/mean",
}
"""TRL's names of what the report reads, and ours for it."""

Row = dict[str, float]
T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """One training run as it was measured. `steps` are step numbers, ascending; `rows[i]` belongs to `steps[i]`."""

    name: str
    folder: Path
    steps: tuple[int, ...]
    rows: tuple[Row, ...]
    lengths: tuple[tuple[int, ...], ...]  # response lengths of each step, empty where they were not recorded
    provenance: dict[str, Any]
    notes: tuple[str, ...]
    repeats: tuple[tuple[Run, ...], ...] = ()
    """Of `repeats.json`: groups of runs without rollspec that differ by chance alone, to tell how much that is."""

    def series(self, *names: str) -> list[float | None]:
        """One value per step: of the first of `names` that the run has at all, None where that step lacks it."""
        for name in names:
            if any(name in row for row in self.rows):
                return [row.get(name) for row in self.rows]
        return [None] * len(self.rows)

    def known(self, *names: str) -> list[float]:
        """The values of `series` that were measured."""
        return [v for v in self.series(*names) if v is not None]

    def has(self, *names: str) -> bool:
        """Whether any step carries one of `names`."""
        return any(name in row for row in self.rows for name in names)

    def names(self, prefix: str) -> list[str]:
        """Metric names under `prefix`, numbers in numeric order (`position/2` before `position/10`)."""
        found = {name for row in self.rows for name in row if name.startswith(prefix)}
        return sorted(found, key=lambda n: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", n)])

    @property
    def epochs(self) -> list[int]:
        """Epoch of each step, from 0; all 0 when the run does not say."""
        return [int(e or 0) for e in self.series(EPOCH)]

    @property
    def all_lengths(self) -> list[int]:
        """Response lengths of all steps together."""
        return [n for step in self.lengths for n in step]


def load_run(folder: str | Path) -> Run:
    """Read a run folder.

    Raises:
        RollspecError: the folder or its metrics are missing, empty or corrupted; names the file and the line.
    """
    folder = Path(folder)
    notes: list[str] = []
    path = folder / METRICS
    if path.is_file():
        objects = _read_lines(path, notes)
    elif (folder / TRAINER_STATE).is_file():
        path = folder / TRAINER_STATE
        objects = _json(path, lambda data: list(data["log_history"]))
    elif not folder.is_dir():
        raise RollspecError(f"rollspec: there is no run folder {str(folder)!r}; give the folder that holds {METRICS}.")
    else:
        wandb = (folder / "wandb").is_dir() or any(folder.glob("*.wandb"))
        raise RollspecError(
            f"rollspec: {path} does not exist; a run folder holds {METRICS}, one JSON object per step, or "
            f"{TRAINER_STATE} of TRL{' (of W&B: docs/monitoring.md says how to export a run)' if wandb else ''}."
        )
    steps, rows, lengths = _rows(objects)
    if not rows:
        raise RollspecError(f"rollspec: {path} holds no training step; let the run finish its first step, then retry.")
    if (folder / LENGTHS_FILE).is_file():
        # Loggers take scalars only, so single lengths come in a file of their own.
        recorded = map(parse_row, _read_lines(folder / LENGTHS_FILE, notes))
        by_step = {step: sizes for step, _, sizes in recorded if step is not None}
        lengths = tuple(by_step.get(step, sizes) for step, sizes in zip(steps, lengths, strict=True))
    provenance: dict[str, Any] = {}
    if (folder / PROVENANCE).is_file():
        provenance = _json(folder / PROVENANCE, dict)
    else:
        notes.append(f"There is no {PROVENANCE}: versions, machine and command line of this run are unknown.")
    if (status := provenance.get("status", "finished")) != "finished":
        notes.append(f"{PROVENANCE} says the run is {status!r}, so it may be incomplete.")
    repeats: tuple[tuple[Run, ...], ...] = ()
    if (folder / REPEATS).is_file():
        repeats = _json(folder / REPEATS, lambda data: tuple(map(_group, data["groups"])))
    name = str(provenance.get("name") or folder.resolve().name)
    return Run(name, folder, steps, rows, lengths, provenance, tuple(notes), repeats)


def find_pair(folder: str | Path) -> tuple[Path, Path | None]:
    """(run, baseline) of `folder`: a run folder stands for itself, a demo folder for the two runs inside it."""
    folder = Path(folder)
    if _is_run(folder):
        return folder, None
    main, base = folder / "rollspec", folder / "baseline"
    if not _is_run(main):
        return base if _is_run(base) else folder, None
    return main, base if _is_run(base) else None


def _is_run(folder: Path) -> bool:
    return (folder / METRICS).is_file() or (folder / TRAINER_STATE).is_file()


def parse_row(obj: dict[str, Any]) -> tuple[int | None, Row, tuple[int, ...]]:
    """(step number or None, numeric metrics, response lengths) of one line of `metrics.jsonl`."""
    data = obj.get("data")
    if isinstance(data, dict):
        obj = {STEP: obj.get("step"), **data}
    row: Row = {}
    for key, value in obj.items():
        number = _number(value)
        if number is not None:
            name = key.removeprefix("train/")  # transformers' callbacks put it before every name
            row[ALIASES.get(name, name)] = number
    if EPOCH not in row and "epoch" in row:  # of transformers: epochs that are over, fractions included
        row[EPOCH] = max(math.ceil(row["epoch"]) - 1, 0)
    sizes = obj.get("lengths")
    lengths = tuple(int(n) for n in map(_number, sizes) if n is not None) if isinstance(sizes, list) else ()
    step = row.get(STEP, row.get("step", row.get("_step")))
    return (None if step is None else int(step)), row, lengths


def _read_lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as e:
        raise RollspecError(f"rollspec: {path} cannot be read ({e.strerror or e}); check its permissions.") from e
    objects: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            obj = json.loads(line.decode("utf-8"))
        except ValueError as e:  # JSONDecodeError and UnicodeDecodeError
            if number == len(lines):  # no newline after it: the writer was stopped in the middle of the line
                notes.append(f"Line {number} of {METRICS} was cut off in the middle and is left out.")
                continue
            raise RollspecError(
                f"rollspec: {path}, line {number}, is not valid JSON ({_short(e)}); repair or delete that line."
            ) from e
        if not isinstance(obj, dict):
            kind = type(obj).__name__
            raise RollspecError(f"rollspec: {path}, line {number}, holds {kind}, not an object of names and values.")
        objects.append(obj)
    if not objects:
        raise RollspecError(f"rollspec: {path} is empty; let the run finish its first step, then retry.")
    return objects


def _json(path: Path, take: Callable[[Any], T]) -> T:
    try:
        return take(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise RollspecError(f"rollspec: {path} cannot be read ({_short(e)}); repair or delete it.") from e


def _rows(objects: Iterable[dict[str, Any]]) -> tuple[tuple[int, ...], tuple[Row, ...], tuple[tuple[int, ...], ...]]:
    """Rows by step; several lines of one step (validation, a resumed run) are merged, the later one wins."""
    merged: dict[int, Row] = {}
    lengths: dict[int, tuple[int, ...]] = {}
    for index, obj in enumerate(objects, 1):
        step, row, sizes = parse_row(obj)
        if step == 0 and GEN not in row:
            continue  # validation before the first training step
        key = index if step is None else step
        merged.setdefault(key, {}).update(row)
        if sizes:
            lengths[key] = sizes
    steps = tuple(sorted(merged))
    return steps, tuple(merged[s] for s in steps), tuple(lengths.get(s, ()) for s in steps)


def _group(runs: list[list[dict[str, Any]]]) -> tuple[Run, ...]:
    return tuple(Run(REPEATS, Path(), *_rows(objects), {}, ()) for objects in runs)


def _number(value: Any) -> float | None:
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    return None


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:120]
