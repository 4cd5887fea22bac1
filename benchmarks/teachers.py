"""What a draft head learns from in a job: the engine's hidden states, those of the policy's log-prob pass, or both.

    python -m benchmarks.teachers --seeds 0,1 --steps 12 --work runs/teachers    # goes on from what is there

One verl job per arm and seed: the demo's, from a fresh head, whose drafts are verified in every step, whether that pays
or not, so that its acceptance is seen in each rollout, which is the first one after a sync of weights. The arms differ
in where samples come from: `dedicated` records requests in the engine, `policy` reads the training pass; trainer,
buffer and versions are the same. Acceptance is of the whole rollout: `drafter/accept_length` is of the version that ran
last in it. What reading costs is the log-prob pass with it over the pass without, per token and step by step, as a
share of the whole step.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.drift import CACHE
from benchmarks.harness import ROOT, provenance, ratio, save, verdict
from benchmarks.jobs import finished, of_seeds, run_missing, seeds_in
from benchmarks.options import arms_and_seeds
from examples.demo.job import Assets, Job, JobSettings, build_job
from examples.demo.runner import provenance_of, run_job
from rollspec.telemetry.runs import STEP, load_run

ARMS = {"engine": "dedicated", "policy": "policy", "both": "dedicated"}
"""`drafter.mode` of each; `both` reads the training pass by `benchmarks.teach_both`."""
READ = ("policy", "both")
"""The arms that read the training pass."""
GOAL = 0.05
"""Share of the step that reading may cost."""
LENGTHS = (1.25, 1.5, 1.7)
"""Acceptance lengths; the tokens that were trained on until then are reported."""
MODULES = "VERL_USE_EXTERNAL_MODULES"
"""What verl's processes import when they begin."""
SECONDS = 1800.0  # bound of a run
DRAFTING = (
    "proposal.drafters=[eagle3]", "proposal.head.k_max=3", "proposal.k_max=3", "proposal.budget.rule=fixed",
    "tuning.strategy=static", "tuning.guard.enabled=false", "drafter.publish_every=20",
    "drafter.training.batch_tokens=512",
)  # fmt: skip
SHOWN = {
    "acceptance": "rollspec/accept/length",
    "version": "rollspec/drafter/version",
    "trained": "rollspec/drafter/train_tokens",
    "captured": "rollspec/drafter/captured",
    "from_policy": "rollspec/drafter/policy_samples",
    "policy_share": "rollspec/drafter/policy_share",
    "capture_share": "rollspec/drafter/capture_share",
    "job_tokens": "perf/total_num_tokens",
    "log_prob_seconds": "timing_s/old_log_prob",
    "generation_seconds": "timing_s/gen",
    "step_seconds": "timing_s/step",
}
"""What is kept of each step."""


def _job(settings: JobSettings, assets: Assets, place: Path, arm: str) -> Job:
    given = (*DRAFTING, f"drafter.mode={ARMS[arm]}")
    job = build_job(settings, assets, place, speculate=True, preset="long_tail", overrides=given)
    if arm == "both":
        more = {MODULES: "benchmarks.teach_both", "PYTHONPATH": str(ROOT)}
        job = replace(job, environment=job.environment | more)
    return job


def rows(place: Path) -> list[dict[str, float]]:
    """What `SHOWN` names, step by step."""
    run = load_run(place)
    series = {label: run.series(name) for label, name in SHOWN.items()}
    return [
        {STEP: float(step)} | {label: v for label, values in series.items() if (v := values[i]) is not None}
        for i, step in enumerate(run.steps)
    ]


def trained_until(steps: Sequence[dict[str, float]], length: float) -> float | None:
    """Tokens that the head was trained on before the first rollout with that acceptance length; None: it never had."""
    trained = 0.0
    for row in steps:
        if row.get("acceptance", 0.0) >= length:
            return trained
        trained += row.get("trained", 0.0)
    return None


def cost(with_reading: Sequence[dict[str, float]], without: Sequence[dict[str, float]]) -> list[float]:
    """Step by step, what reading adds to the log-prob pass of its tokens, over the whole step; the first, which warms
    up, is left out.
    """
    found = []
    for ours, theirs in zip(with_reading[1:], without[1:], strict=False):
        quiet = theirs["log_prob_seconds"] / theirs["job_tokens"] * ours["job_tokens"]
        found.append((ours["log_prob_seconds"] - quiet) / ours["step_seconds"])
    return found


def summary(steps: Sequence[dict[str, float]]) -> dict[str, float | None]:
    """Of one job: how much the head had at the end, and what it cost. The first step, which warms up, is left out."""
    later, last = steps[1:], steps[-max(1, len(steps) // 4) :]

    def total(name: str, of: Sequence[dict[str, float]] = steps) -> float:
        return sum(row.get(name, 0.0) for row in of)

    return {
        "acceptance_last_quarter": total("acceptance", last) / len(last),
        "acceptance_after_sync": total("acceptance", later) / max(1, len(later)),
        "trained_tokens": total("trained"),
        **{f"trained_tokens_until_{length}": trained_until(steps, length) for length in LENGTHS},
        "samples": total("captured") + total("from_policy"),
        "log_prob_seconds": total("log_prob_seconds", later) / max(1, len(later)),
        "generation_seconds": total("generation_seconds", later) / max(1, len(later)),
        "step_seconds": total("step_seconds", later) / max(1, len(later)),
        "policy_share": steps[-1].get("policy_share", 0.0),
    }


def costs_of(reading: dict[str, Any], quiet: dict[str, Any]) -> dict[str, Any]:
    """The share of a step that reading costs, over all pairs of steps of the seeds that both arms have."""
    shares = [
        s for seed in sorted(reading) if seed in quiet for s in cost(reading[seed]["steps"], quiet[seed]["steps"])
    ]
    if not shares:
        return {}
    found = ratio(shares, [1.0] * len(shares))
    return {"pairs": found.n, "mean": mean(shares), "verdict": verdict(found, GOAL), **asdict(found)}


def run(seeds: Sequence[int], steps: int, work: Path, arms: Sequence[str], out: Path | None = None) -> Path:
    """Run what is missing in `work`, and write what all that is there gives."""
    console, began = Console(stderr=True), provenance()
    work = work.resolve()
    settings = JobSettings(steps=steps)
    asked = of_seeds(seeds, arms, work, settings, _job)
    run_missing(asked, lambda job, show: run_job(job, timeout=SECONDS, on_step=show), console)
    done = finished(of_seeds(seeds_in(work), tuple(ARMS), work, settings, _job), console)
    found: dict[str, dict[str, Any]] = {}
    for arm, seed, job in done:
        found.setdefault(arm, {})[str(seed)] = {"steps": (each := rows(job.folder)), **summary(each)}
    columns = list(summary([{}]))
    table = Table("arm", "seed", *(name.replace("_", " ") for name in columns), title="what the head learned from")
    for arm, by_seed in found.items():
        for at, one in by_seed.items():
            cells = ("never" if (value := one[name]) is None else f"{value:.4g}" for name in columns)
            table.add_row(arm, at, *cells)
    console.print(table)
    costs = {arm: c for arm in READ if arm in found and (c := costs_of(found[arm], found.get("engine", {})))}
    for arm, one in costs.items():
        console.print(
            f"reading the training pass ({arm}) costs {one['median']:.1%} ({one['low']:.1%} to {one['high']:.1%}) of "
            f"the step, goal {GOAL:.0%}: {one['verdict']}", highlight=False,
        )  # fmt: skip
    result = {
        "benchmark": "teachers",
        "provenance": began,
        "commits": sorted({str(provenance_of(job.folder).get("git_sha")) for _, _, job in done}),
        "settings": {"steps": steps, "overrides": DRAFTING, "preset": "long_tail"},
        "arms": found,
        "cost": costs,
    }
    return save("teachers", result, out)


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(
        description="Train a head in a job from the engine's states, the policy's or both."
    )
    parser.add_argument("--seeds", default="0", help="separated by commas")
    parser.add_argument("--steps", type=int, default=12, help="training steps of a job")
    parser.add_argument("--arms", default=";".join(ARMS), help="separated by semicolons")
    parser.add_argument("--work", type=Path, default=CACHE / "teachers", help="folder of the jobs")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    arms, seeds = arms_and_seeds(parser, args.arms, args.seeds, ARMS)
    print(run(seeds, args.steps, args.work, arms, args.out))


if __name__ == "__main__":
    main()
