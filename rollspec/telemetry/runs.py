"""Reads a run folder: `metrics.jsonl` (one object per training step) and `run.json` (where the run came from); or, in
its place, TRL's `trainer_state.json`, or what W&B wrote (wandb_files.py).

    run = load_run("runs/latest/rollspec")
    run.series("timing_s/gen")        # [11.2, 9.8, None, ...], one entry per step

Two line formats are read: flat metric names, and verl's `file` logger, `{"step": 3, "data": {...}}`. What was not
measured stays None: the report says what is missing instead of showing zeros.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollspec.errors import RollspecError
from rollspec.telemetry import wandb_files

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
    """Read a run folder, or a run of W&B's.

    Raises:
        RollspecError: the folder or its metrics are missing, empty or corrupted; names the file and the line.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RollspecError(f"rollspec: there is no run folder {str(folder)!r}; give the folder that holds {METRICS}.")
    path, objects, found, notes = _source(folder)
    steps, rows, lengths = _rows(objects)
    if not rows:
        raise RollspecError(f"rollspec: {path} holds no training step; let the run finish its first step, then retry.")
    if (folder / LENGTHS_FILE).is_file():
        # Loggers take scalars only, so single lengths come in a file of their own.
        recorded, more = _read_lines(folder / LENGTHS_FILE)
        by_step = {step: sizes for step, _, sizes in map(parse_row, recorded) if step is not None}
        lengths = [by_step.get(step, sizes) for step, sizes in zip(steps, lengths, strict=True)]
        notes.extend(more)
    provenance = found or _read_provenance(folder / PROVENANCE, notes)
    status = provenance.get("status")
    if status not in (None, "finished"):
        notes.append(f"{PROVENANCE} says the run is {status!r}, so it may be incomplete.")
    label = str(provenance.get("name") or folder.resolve().name)
    return Run(
        label, folder, tuple(steps), tuple(rows), tuple(lengths), provenance, tuple(notes), _read_repeats(folder)
    )


def is_run(folder: Path) -> bool:
    """Whether `folder` holds measurements of a run."""
    return (folder / METRICS).is_file() or (folder / TRAINER_STATE).is_file() or len(wandb_files.find(folder)) == 1


def _source(folder: Path) -> tuple[Path, list[dict[str, Any]], dict[str, Any], list[str]]:
    """(file, one object per logged step, where the run came from as far as the file says, notes)."""
    path = folder / METRICS
    if path.is_file():
        objects, notes = _read_lines(path)
        return path, objects, {}, notes
    if (folder / TRAINER_STATE).is_file():
        path = folder / TRAINER_STATE
        try:
            return path, list(json.loads(path.read_text(encoding="utf-8"))["log_history"]), {}, []
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise RollspecError(f"rollspec: {path} cannot be read ({_short(e)}); repair or delete it.") from e
    found = wandb_files.find(folder)
    if len(found) == 1:
        return found[0], *wandb_files.read(found[0])
    if found:
        names = ", ".join(p.parent.name for p in found[:5])
        raise RollspecError(f"rollspec: {folder} holds {len(found)} runs of W&B's; give one of their folders: {names}.")
    raise RollspecError(
        f"rollspec: {path} does not exist; a run folder holds {METRICS}, one JSON object per step, or {TRAINER_STATE} "
        "of TRL, or a wandb folder."
    )


def find_pair(folder: str | Path) -> tuple[Path, Path | None]:
    """(run, baseline) of `folder`: a run folder stands for itself, a demo folder for the two runs inside it."""
    folder = Path(folder)
    if is_run(folder):
        return folder, None
    inside = [folder / name for name in ("rollspec", "baseline") if is_run(folder / name)]
    if len(inside) == 2:
        return inside[0], inside[1]
    return (inside[0], None) if inside else (folder, None)


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


def _read_lines(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    try:
        raw = path.read_bytes()
    except OSError as e:
        raise RollspecError(f"rollspec: {path} cannot be read ({e.strerror or e}); check its permissions.") from e
    lines = raw.split(b"\n")
    objects: list[dict[str, Any]] = []
    notes: list[str] = []
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
            raise RollspecError(
                f"rollspec: {path}, line {number}, holds {type(obj).__name__}, not an object of names and values."
            )
        objects.append(obj)
    if not objects:
        raise RollspecError(f"rollspec: {path} is empty; let the run finish its first step, then retry.")
    return objects, notes


def _rows(objects: Iterable[dict[str, Any]]) -> tuple[list[int], list[Row], list[tuple[int, ...]]]:
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
    steps = sorted(merged)
    return steps, [merged[s] for s in steps], [lengths.get(s, ()) for s in steps]


def _read_provenance(path: Path, notes: list[str]) -> dict[str, Any]:
    if not path.is_file():
        notes.append(f"There is no {PROVENANCE}: versions, machine and command line of this run are unknown.")
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise RollspecError(f"rollspec: {path} cannot be read as JSON ({_short(e)}); repair or delete it.") from e
    if not isinstance(data, dict):
        raise RollspecError(f"rollspec: {path} holds {type(data).__name__}, not an object; repair or delete it.")
    return data


def _read_repeats(folder: Path) -> tuple[tuple[Run, ...], ...]:
    path = folder / REPEATS
    if not path.is_file():
        return ()
    try:
        groups = json.loads(path.read_text(encoding="utf-8"))["groups"]
        return tuple(tuple(_repeat(folder, rows) for rows in group) for group in groups)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise RollspecError(
            f"rollspec: {path} cannot be read as groups of runs ({_short(e)}); repair or delete it."
        ) from e


def _repeat(folder: Path, objects: list[dict[str, Any]]) -> Run:
    steps, rows, lengths = _rows(objects)
    return Run(REPEATS, folder, tuple(steps), tuple(rows), tuple(lengths), {}, ())


def _number(value: Any) -> float | None:
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    return None


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:120]
