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
from dataclasses import dataclass, field
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
    lengths: tuple[tuple[int, ...], ...] = ()  # of each step, empty where they were not recorded
    provenance: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    repeats: tuple[tuple[Run, ...], ...] = ()
    """Of `repeats.json`: groups of runs without rollspec that differ by chance alone, to tell how much that is."""

    def series(self, *names: str) -> list[float | None]:
        """One value per step: of the first of `names` that the run has at all, None where that step lacks it."""
        name = next(filter(self.has, names), names[-1])
        return [row.get(name) for row in self.rows]

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
    if (path := folder / METRICS).is_file():
        objects = _read_lines(path, notes)
    elif (path := folder / TRAINER_STATE).is_file():
        objects = _json(path, lambda data: list(data["log_history"]))
    elif not folder.is_dir():
        raise RollspecError(f"rollspec: there is no run folder {str(folder)!r}; give the folder that holds {METRICS}.")
    else:
        wandb = (folder / "wandb").is_dir() or any(folder.glob("*.wandb"))
        raise RollspecError(
            f"rollspec: {folder / METRICS} does not exist; a run folder holds {METRICS}, one JSON object per step, or "
            f"{TRAINER_STATE} of TRL{' (of W&B: docs/monitoring.md says how to export a run)' if wandb else ''}."
        )
    steps, rows = _rows(objects)
    if not rows:
        raise RollspecError(f"rollspec: {path} holds no training step; let the run finish its first step, then retry.")
    lengths: dict[int | None, tuple[int, ...]] = {}
    if (path := folder / LENGTHS_FILE).is_file():
        lengths = {parse_row(obj)[0]: _sizes(obj) for obj in _read_lines(path, notes)}
    provenance: dict[str, Any] = {}
    if (path := folder / PROVENANCE).is_file():
        provenance = _json(path, dict)
    else:
        notes.append(f"There is no {PROVENANCE}: versions, machine and command line of this run are unknown.")
    if (status := provenance.get("status", "finished")) != "finished":
        notes.append(f"{PROVENANCE} says the run is {status!r}, so it may be incomplete.")
    repeats: tuple[tuple[Run, ...], ...] = ()
    if (path := folder / REPEATS).is_file():
        repeats = _json(
            path, lambda data: tuple(tuple(Run("", path, *_rows(run)) for run in g) for g in data["groups"])
        )
    name = str(provenance.get("name") or folder.resolve().name)
    sizes = tuple(lengths.get(step, ()) for step in steps)
    return Run(name, folder, steps, rows, sizes, provenance, tuple(notes), repeats)


def find_pair(folder: str | Path) -> tuple[Path, Path | None]:
    """(run, baseline) of `folder`: a run folder stands for itself, a demo folder for the two runs inside it."""
    own, main, base = (Path(folder, part) for part in ("", "rollspec", "baseline"))
    if _is_run(own):
        return own, None
    if not _is_run(main):
        return base if _is_run(base) else own, None
    return main, base if _is_run(base) else None


def _is_run(folder: Path) -> bool:
    return (folder / METRICS).is_file() or (folder / TRAINER_STATE).is_file()


def parse_row(obj: dict[str, Any]) -> tuple[int | None, Row]:
    """(step number or None, numeric metrics) of one line of `metrics.jsonl`."""
    data = obj.get("data")
    if isinstance(data, dict):
        obj = {STEP: obj.get("step"), **data}
    row: Row = {}
    for key, value in obj.items():
        if _is_number(value):
            name = key.removeprefix("train/")  # transformers' callbacks put it before every name
            row[ALIASES.get(name, name)] = float(value)
    if EPOCH not in row and "epoch" in row:  # of transformers: epochs that are over, fractions included
        row[EPOCH] = max(math.ceil(row["epoch"]) - 1, 0)
    step = row.get(STEP, row.get("step", row.get("_step")))
    return (None if step is None else int(step)), row


def _rows(objects: Iterable[dict[str, Any]]) -> tuple[tuple[int, ...], tuple[Row, ...]]:
    """Steps and their rows; several lines of one step (validation, a resumed run) are merged, the later one wins."""
    merged: dict[int, Row] = {}
    for index, (step, row) in enumerate(map(parse_row, objects), 1):
        if step != 0 or GEN in row:  # else it is validation before the first training step
            merged.setdefault(index if step is None else step, {}).update(row)
    steps = tuple(sorted(merged))
    return steps, tuple(merged[s] for s in steps)


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
                notes.append(f"Line {number} of {path.name} was cut off in the middle and is left out.")
                continue
            raise RollspecError(
                f"rollspec: {path}, line {number}, is not valid JSON ({_short(e)}); repair or delete that line."
            ) from e
        if not isinstance(obj, dict):
            kind = type(obj).__name__
            raise RollspecError(f"rollspec: {path}, line {number}, holds {kind}, not an object of names and values.")
        objects.append(obj)
    return objects


def _json(path: Path, take: Callable[[Any], T]) -> T:
    try:
        return take(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise RollspecError(f"rollspec: {path} cannot be read ({_short(e)}); repair or delete it.") from e


def _sizes(obj: dict[str, Any]) -> tuple[int, ...]:
    """Response lengths of one line of `lengths.jsonl`; what is no number is left out."""
    found = obj.get("lengths")
    return tuple(int(n) for n in found if _is_number(n)) if isinstance(found, list) else ()


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float) and math.isfinite(value)


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:120]
