"""What past rollouts save in the demo's GRPO job: drafts alone, replays under kept noise, SPEC-RL's lossy prefixes.

    rollspec bench reuse
    rollspec bench reuse --seeds 0 --arms 'none;coupled'      # one part; a later call resumes from what is there

Each (arm, seed) is a whole training job; arms of one seed share policy, prompts, order and seeds, and differ in
`rollout.custom.rollspec` alone. Finished jobs are kept in a folder and are not run again, so that a long benchmark can
be made in parts. What is saved is counted in tokens, which needs no clock; times are as busy as the machine was.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.drift import CACHE
from benchmarks.harness import QUICK, pin, provenance, save
from benchmarks.jobs import OnStep, finished, folder, of_seeds, run_missing, seeds_in
from benchmarks.reuse_table import read, summarise, table
from examples.demo.job import Assets, Job, JobSettings, build_job, prepare_assets
from examples.demo.runner import run_job
from rollspec.errors import RollspecError
from rollspec.telemetry.runs import load_run

ARMS: dict[str, tuple[str, tuple[str, ...]] | None] = {
    "none": None,
    "independent": ("default", ()),
    "coupled": ("coupled_reuse", ()),
    "lenient, bias 0": ("spec_rl", ("reuse.bias=0",)),
    "lenient, bias 0.5": ("spec_rl", ("reuse.bias=0.5",)),
}
"""Preset and overrides; None: the job without rollspec."""

SEEDS = (0, 1, 2)
SETTINGS = JobSettings(epochs=2, dtype="float32")
"""The demo's job, stopped after its second epoch: as many updates lie between two rollouts of a prompt as there. In
float32, because a CPU without bfloat16 arithmetic takes thirty times as long to train in it.
"""

UPDATES = SETTINGS.steps_per_epoch


def _job(settings: JobSettings, assets: Assets, place: Path, arm: str) -> Job:
    given = ARMS[arm]
    preset, overrides = given or ("default", ())
    if given is not None and preset == "coupled_reuse":
        overrides = (*overrides, f"coupled.seed={settings.seed}")
    return build_job(settings, assets, place, speculate=given is not None, preset=preset, overrides=overrides)


def train(job: Job, settings: JobSettings, on_step: OnStep) -> None:
    """Run a job, and keep the policy of the end of each epoch under `epoch_<e>` in its folder."""
    more = (
        f"trainer.save_freq={settings.steps_per_epoch}",
        "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]",
    )
    run_job(dataclasses.replace(job, command=(*job.command, *more)), timeout=1500, stall=900, on_step=on_step)
    for epoch in range(1, settings.epochs):
        saved = job.folder / "checkpoints" / f"global_step_{epoch * settings.steps_per_epoch}" / "actor" / "huggingface"
        if saved.is_dir():
            shutil.copytree(saved, job.folder / f"epoch_{epoch}", dirs_exist_ok=True)
    shutil.rmtree(job.folder / "checkpoints", ignore_errors=True)


def distance(work: Path, arm: str, seed: int, settings: JobSettings) -> dict[str, Any] | None:
    """How far a lossy job's distribution was from its policy's: the job's own rule between its starting policy and the
    one an epoch later, on its prompts. Kept beside the job. None where the job saved no such policy.
    """
    from benchmarks.two_policies import check_lossy, rollouts
    from rollspec.audit.engine import AuditPlan, Variant
    from rollspec.audit.prompts import token_prompts
    from rollspec.audit.reference import Reference

    kept = folder(work, arm, seed) / "distance.json"
    if kept.is_file():
        found: dict[str, Any] = json.loads(kept.read_text())
        return found
    given, later = ARMS[arm], folder(work, arm, seed) / "epoch_1"
    if given is None or not later.is_dir():
        return None
    assets = prepare_assets(dataclasses.replace(settings, seed=seed), CACHE / "grpo_arithmetic")
    longest = min(settings.max_response_length, 200)
    prompts = token_prompts(assets.model, Path(assets.train), 8, longest)
    plan = AuditPlan(prompts, tokens=10_000, max_tokens=longest, temperature=settings.temperature, seed=seed)
    chosen = Variant.with_rollspec(given[0], given[1])
    output = rollouts(later, plan, chosen, assets.model)
    new, old = (Reference(m, plan.temperature) for m in (later, assets.model))
    config = (chosen.rollspec or {})["reuse"]
    check = check_lossy(output.samples, output.ruled, plan.prompts, new, old, config["bias"])
    found = dataclasses.asdict(check) | {"ruled_share": check.ruled / max(1, check.tokens)}
    kept.write_text(json.dumps(found, indent=1))
    return found


def run(
    quick: bool = False,
    seeds: Sequence[int] = SEEDS,
    arms: Sequence[str] = tuple(ARMS),
    prompts: int = SETTINGS.train_prompts,
    work: Path | None = None,
    out: Path | None = None,
) -> Path:
    """Run what is missing, print and save the comparison of all that is finished.

    Args:
        prompts: of an epoch, which has eight updates whatever their number.
    """
    if prompts < UPDATES or prompts % UPDATES:
        raise RollspecError(f"rollspec: --prompts {prompts} does not make {UPDATES} updates; give a multiple of it.")
    pin()
    console = Console(stderr=True)
    settings = dataclasses.replace(SETTINGS, train_prompts=prompts, prompts_per_step=prompts // UPDATES)
    if quick:
        settings = dataclasses.replace(SETTINGS, size="tiny", train_prompts=8, epochs=2)
        console.print(QUICK)
        seeds = tuple(seeds)[:1]
    work = work or CACHE / (
        "reuse-quick" if quick else "reuse" if prompts == SETTINGS.train_prompts else f"reuse-{prompts}"
    )
    began = provenance()
    asked = of_seeds(seeds, arms, work, settings, _job)
    run_missing(asked, lambda job, on_step: train(job, settings, on_step), console)
    runs: dict[str, dict[int, Any]] = {}
    loads = {}
    for arm, seed, job in finished(of_seeds(seeds_in(work), tuple(ARMS), work, settings, _job), console):
        ended = load_run(job.folder)
        runs.setdefault(arm, {})[seed] = read(ended, settings)
        loads[f"{arm}/{seed}"] = ended.provenance.get("wall_seconds")
    distances: dict[str, dict[int, Any]] = {}
    for arm, seed in ((a, s) for a in runs for s in runs[a] if any(r["lossy"] for r in runs[a].values())):
        with console.status(f"seed {seed}, {arm}: distance from the policy"):
            found = distance(work, arm, seed, settings)
        if found is not None:
            distances.setdefault(arm, {})[seed] = found
    summary = summarise(runs, distances)
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
            "distances": distances,
            "summary": summary,
        },
        out,
    )
