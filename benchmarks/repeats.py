"""Do responses get shorter or rewards change with rollspec? Whole jobs: without/without pairs, and without/with.

    rollspec bench repeats
    rollspec bench repeats --seeds 0,1 --work runs/repeats    # a part; a later call goes on from what is there

The job is the demo's, so that the runs of a demo that was not cut short can be copied to `seed-0/without` and
`seed-0/with` of the work folder.

Two trainings of one job part at the first token that is sampled differently, and stay apart: their steps are not
independent, so a test over steps finds differences between runs without rollspec, too. Here every seed (of the policy
and the prompts) is trained three times: without rollspec, without it and with another seed of the engine, and with it.
The pairs without rollspec say what chance does. `rollspec demo` compares its runs with them. The demo's job differs
with the machine's number format, so the results of a machine without bfloat16 have a file of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.drift import CACHE
from benchmarks.harness import QUICK, provenance, save
from benchmarks.jobs import finished, of_seeds, run_missing, seeds_in
from examples.demo.cli import settings_for
from examples.demo.job import Assets, Job, JobSettings, build_job
from examples.demo.runner import provenance_of, run_job
from rollspec.machine import native_dtype
from rollspec.telemetry.runs import STEP, Run, load_run
from rollspec.telemetry.summary import PHASES, REWARD, t_critical, tokens_per_step

ARMS = ("without", "again", "with")
SECONDS = 3600.0  # bound of a run
LENGTH = ("response_length/mean",)
OTHER_SEED = 1000
"""Added to the engine's seed of a second run without rollspec: the same policy and prompts, other noise."""

SAME = ("size", "train_prompts", "prompts_per_step", "n", "epochs", "max_prompt_length", "max_response_length", "lr",
        "temperature", "dtype", "model")  # fmt: skip
"""Settings of a job whose runs may be compared with these."""


def _job(settings: JobSettings, assets: Assets, place: Path, arm: str) -> Job:
    own = replace(settings, engine_seed=settings.seed + OTHER_SEED) if arm == "again" else settings
    return build_job(own, assets, place, speculate=arm == "with")


def rows(run: Run) -> list[dict[str, float]]:
    """Reward and mean length of each step, by the names that the report reads."""
    series = zip(run.steps, run.series(*REWARD), run.series(*LENGTH), strict=True)
    named = ({STEP: step, REWARD[1]: reward, LENGTH[0]: length} for step, reward, length in series)
    return [{name: value for name, value in row.items() if value is not None} for row in named]


def phases(run: Run) -> dict[str, float]:
    """Microseconds per response token of each phase of the step, without the first step, which warms up."""
    tokens = sum(n or 0.0 for n in tokens_per_step(run)[1:])
    seconds = {name: sum(s or 0.0 for s in run.series(f"timing_s/{name}")[1:]) for name in PHASES}
    return {name: 1e6 * s / tokens for name, s in seconds.items() if s and tokens}


def difference(one: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]], name: str) -> float:
    """Mean of `other` - `one` over the steps that both have."""
    theirs = {row[STEP]: row[name] for row in one if name in row}
    return fmean(row[name] - theirs[row[STEP]] for row in other if name in row and row[STEP] in theirs)


def shift(without: Sequence[float], with_rollspec: Sequence[float]) -> dict[str, Any]:
    """Differences of the pairs, and the mean shift with rollspec in the spread of the pairs without.

    Args:
        without: of each without/without pair. Their mean is zero by symmetry, so each gives a degree of freedom.
        with_rollspec: of each without/with pair.
    """
    out: dict[str, Any] = {"without": list(without), "with": list(with_rollspec)}
    if len(without) < 2 or not with_rollspec:
        return out
    spread = math.sqrt(fmean(d * d for d in without))
    bound = t_critical(len(without)) * spread / math.sqrt(len(with_rollspec))
    mean = fmean(with_rollspec)
    return out | {"spread": spread, "shift": mean, "bound": bound, "shifted": abs(mean) > bound}


def summarise(found: Mapping[int, Mapping[str, list[dict[str, float]]]]) -> dict[str, Any]:
    """Of lengths and rewards, the differences of all pairs that are there."""
    out = {}
    for label, name in (("length", LENGTH[0]), ("reward", REWARD[1])):
        pairs = [
            [difference(runs["without"], runs[arm], name) for runs in found.values() if {"without", arm} <= {*runs}]
            for arm in ARMS[1:]
        ]
        out[label] = shift(*pairs)
    return out


def table(summary: Mapping[str, Any]) -> Table:
    """For people."""
    t = Table(title="Two runs of one job: means over its steps")
    for column in ("", "without/without", "without/with", "shift with rollspec, and what chance gives"):
        t.add_column(column, justify="right" if column else "left")
    for label, digits in (("length", 2), ("reward", 4)):
        found = summary[label]
        cells = [", ".join(f"{d:+.{digits}f}" for d in found[side]) for side in ("without", "with")]
        last = f"{found['shift']:+.{digits}f} within ±{found['bound']:.{digits}f}" if "shift" in found else ""
        t.add_row(label, *cells, last.replace("within", "beyond") if found.get("shifted") else last)
    return t


def run(
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    arms: Sequence[str] = ARMS,
    steps: int | None = None,
    quick: bool = False,
    work: Path | None = None,
    out: Path | None = None,
) -> Path:
    """Run what is missing in `work`, then compare all that is there; the JSON."""
    console = Console(stderr=True)
    if quick:
        name, settings = "repeats-quick", JobSettings(size="tiny", train_prompts=8, epochs=2, steps=2)
    else:
        settings = settings_for(native_dtype(), None, steps=steps)
        name = "repeats" if settings.dtype == "bfloat16" else f"repeats-{settings.dtype}"
    work = (work or CACHE / name).resolve()
    began = provenance()
    asked = of_seeds(seeds, arms, work, settings, _job)
    run_missing(asked, lambda job, show: run_job(job, timeout=SECONDS, on_step=show), console)
    found: dict[int, dict[str, list[dict[str, float]]]] = {}
    done = finished(of_seeds(seeds_in(work), ARMS, work, settings, _job), console)
    times: dict[str, dict[str, float]] = {}
    for arm, seed, job in done:
        trained = load_run(job.folder)
        found.setdefault(seed, {})[arm] = rows(trained)
        times[f"seed {seed}, {arm}"] = phases(trained)
    result = {
        "benchmark": "repeats",
        **({"note": QUICK} if quick else {}),
        "provenance": began,
        "commits": sorted({str(provenance_of(job.folder).get("git_sha")) for _, _, job in done}),
        "settings": {name: asdict(settings)[name] for name in SAME},
        **summarise(found),
        "seeds": sorted(found),
        "groups": [[runs[a] for a in ARMS[:2] if a in runs] for runs in found.values()],
        "phases": times,
        "with_rollspec": [runs["with"] for runs in found.values() if "with" in runs],
    }
    path = save(name, result, out)
    console.print(table(result))
    return path
