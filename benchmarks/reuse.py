"""What past rollouts save in the demo's GRPO job: drafts alone, replays under kept noise, SPEC-RL's lossy prefixes.

    rollspec bench reuse
    rollspec bench reuse --seeds 0 --arms 'none;coupled'      # one part; a later call goes on from what is there

Each (arm, seed) is a whole training job; arms of one seed share policy, prompts, order and seeds, and differ in
`rollout.custom.rollspec` alone. Finished jobs are kept in a folder and are not run again, so that a long benchmark can
be made in parts. What is saved is counted in tokens, which needs no clock; times are as busy as the machine was.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.harness import QUICK, pin, provenance, save
from benchmarks.reuse_table import read, steps, summarise, table
from rollspec.demo.job import Job, JobSettings, build_job, prepare_assets
from rollspec.demo.runner import finished_run, run_job
from rollspec.errors import RollspecError
from rollspec.telemetry.runs import load_run

CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "rollspec"

ARMS: dict[str, tuple[str, tuple[str, ...]] | None] = {
    "none": None,
    "independent": ("default", ()),
    "coupled": ("coupled_reuse", ()),
    "lenient, bias 0": ("spec_rl", ("reuse.bias=0",)),
    "lenient, bias 0.5": ("spec_rl", ("reuse.bias=0.5",)),
}
"""Preset and overrides; None: the job without rollspec."""

SEEDS = (0, 1, 2)
SETTINGS = JobSettings(epochs=2)
"""The demo's job, stopped after its second epoch: as many updates lie between two rollouts of a prompt as there."""


def jobs(
    seeds: Sequence[int], arms: Sequence[str], work: Path, settings: JobSettings = SETTINGS
) -> list[tuple[str, int, Job]]:
    """(arm, seed, job) of everything asked for, whole seeds first."""
    found = []
    for seed in seeds:
        chosen = dataclasses.replace(settings, seed=seed)
        assets = prepare_assets(chosen, CACHE / "grpo_arithmetic")
        for arm in arms:
            given = ARMS[arm]
            preset, overrides = given or ("default", ())
            if given is not None and preset == "coupled_reuse":
                overrides = (*overrides, f"coupled.seed={seed}")
            job = build_job(
                chosen, assets, folder(work, arm, seed), speculate=given is not None, preset=preset, overrides=overrides
            )
            found.append((arm, seed, job))
    return found


def folder(work: Path, arm: str, seed: int) -> Path:
    """Run folder of a job."""
    return work / f"seed-{seed}" / arm.replace(", ", "-").replace(" ", "-")


def train(job: Job, settings: JobSettings) -> None:
    """Run a job, and keep the policy of the end of each epoch under `epoch_<e>` in its folder."""
    more = (
        f"trainer.save_freq={settings.steps_per_epoch}",
        "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]",
    )
    run_job(dataclasses.replace(job, command=(*job.command, *more)), timeout=1500, stall=900)
    for epoch in range(1, settings.epochs):
        saved = job.folder / "checkpoints" / f"global_step_{epoch * settings.steps_per_epoch}" / "actor" / "huggingface"
        if saved.is_dir():
            shutil.copytree(saved, job.folder / f"epoch_{epoch}", dirs_exist_ok=True)
    shutil.rmtree(job.folder / "checkpoints", ignore_errors=True)


def run(
    quick: bool = False,
    seeds: Sequence[int] = SEEDS,
    arms: Sequence[str] = tuple(ARMS),
    work: Path | None = None,
    out: Path | None = None,
) -> Path:
    """Run what is missing, print and save the comparison of all that is finished."""
    if unknown := [a for a in arms if a not in ARMS]:
        raise RollspecError(f"rollspec: --arms has {unknown[0]!r}; choose from {'; '.join(ARMS)}.")
    pin()
    console = Console(stderr=True)
    settings = dataclasses.replace(SETTINGS, size="tiny", train_prompts=8, epochs=2) if quick else SETTINGS
    if quick:
        console.print(QUICK)
        seeds = tuple(seeds)[:1]
    work = work or CACHE / ("reuse-quick" if quick else "reuse")
    began = provenance()
    for arm, seed, job in jobs(seeds, arms, work, settings):
        if finished_run(job.folder, job.settings_hash):
            console.print(f"seed {seed}, {arm}: finished before", highlight=False)
            continue
        with console.status(f"seed {seed}, {arm}"):
            train(job, settings)
        console.print(f"seed {seed}, {arm}: {steps(settings)} steps", highlight=False)
    runs: dict[str, dict[int, Any]] = {}
    loads = {}
    for arm in ARMS:
        for path in sorted(work.glob(f"seed-*/{folder(work, arm, 0).name}/run.json")):
            if json.loads(path.read_text()).get("status") == "finished":
                seed = int(path.parent.parent.name.removeprefix("seed-"))
                runs.setdefault(arm, {})[seed] = read(load_run(path.parent), settings)
                loads[f"{arm}/{seed}"] = json.loads(path.read_text()).get("wall_seconds")
    summary = summarise(runs)
    console.print(table(summary))
    return save(
        "reuse" + ("-quick" if quick else ""),
        {
            "benchmark": "reuse",
            "provenance": began,
            "settings": dataclasses.asdict(settings),
            "arms": {name: {"preset": a[0], "overrides": a[1]} if a else None for name, a in ARMS.items()},
            "job_seconds": loads,
            "runs": runs,
            "summary": summary,
        },
        out,
    )
