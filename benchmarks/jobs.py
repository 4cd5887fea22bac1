"""Whole training jobs of a benchmark, by arm and seed: finished ones are kept in a folder and are not run again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.drift import CACHE
from examples.demo.job import Assets, Job, JobSettings, prepare_assets
from examples.demo.runner import finished_run
from rollspec.telemetry.runs import PROVENANCE

OnStep = Callable[[dict[str, float]], None]
"""Takes the metrics of a training step as it ends."""


Build = Callable[[JobSettings, Assets, Path, str], Job]
"""Of settings with their seed, the assets, the run's folder, and the arm."""


def of_seeds(
    seeds: Sequence[int], arms: Sequence[str], work: Path, settings: JobSettings, build: Build
) -> list[tuple[str, int, Job]]:
    """(arm, seed, job) of everything asked for, whole seeds first, on the example's policy."""
    found = []
    for seed in seeds:
        chosen = dataclasses.replace(settings, seed=seed)
        assets = prepare_assets(chosen, CACHE / "grpo_arithmetic")
        for arm in arms:
            place = folder(work, arm, seed)
            place.mkdir(parents=True, exist_ok=True)
            found.append((arm, seed, build(chosen, assets, place, arm)))
    return found


def folder(work: Path, arm: str, seed: int) -> Path:
    """Run folder of a job."""
    return work / f"seed-{seed}" / arm.replace(", ", "-").replace(" ", "-")


def seeds_in(work: Path) -> list[int]:
    """Seeds that have a folder of `folder`."""
    return sorted(int(path.name.removeprefix("seed-")) for path in work.glob("seed-*"))


def run_missing(jobs: Sequence[tuple[str, int, Job]], train: Callable[[Job, OnStep], Any], console: Console) -> None:
    """Run those of `jobs`, (arm, seed, job), that are not finished, and say how far they are."""
    for arm, seed, job in jobs:
        name = f"seed {seed}, {arm}"
        if finished_run(job.folder, job.settings_hash):
            console.print(f"{name}: finished before", highlight=False)
            continue
        with console.status(name) as status:

            def show(row: dict[str, float], name: str = name, update: Callable[[str], None] = status.update) -> None:
                update(f"{name}: step {int(row.get('training/global_step', 0))}")

            train(job, show)
        console.print(f"{name}: {job.total_steps} steps", highlight=False)


def finished(jobs: Sequence[tuple[str, int, Job]], console: Console) -> list[tuple[str, int, Job]]:
    """The finished ones of `jobs`, of this call or an earlier one; it says of which others something lies there."""
    found = []
    for arm, seed, job in jobs:
        if finished_run(job.folder, job.settings_hash):
            found.append((arm, seed, job))
        elif (job.folder / PROVENANCE).is_file():
            console.print(f"seed {seed}, {arm}: unfinished or of other settings, left out", highlight=False)
    return found
