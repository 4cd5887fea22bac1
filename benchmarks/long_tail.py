"""The `long_tail` preset in whole GRPO jobs with two replicas: what a draft head adds to suffix drafts, and what
training it on the device of an idle engine costs the job.

    rollspec bench long-tail
    rollspec bench long-tail --arms 'suffix;long_tail' --seeds 1    # one part; a later call resumes from what is there

Every job is the demo's, on two replicas, in float32 and under coupled sampling: all arms say the same tokens, so steps
are compared pair by pair over the same work (`same_lengths` says in how many they are). One replica's share of a
rollout is often finished before the other's; that is the idle time that training may use. Finished jobs are kept in a
folder and are not run again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.drift import CACHE
from benchmarks.harness import QUICK, Ratio, pin, provenance, ratio, save, verdict
from benchmarks.jobs import OnStep, finished, of_seeds, run_missing, seeds_in
from examples.demo.job import Assets, Job, JobSettings, build_job
from examples.demo.runner import run_job
from rollspec.telemetry.runs import GEN, STEP_TIME, Run, load_run
from rollspec.telemetry.summary import REWARD

SETTINGS = JobSettings(train_prompts=8, prompts_per_step=2, epochs=4, dtype="float32", replicas=2)

TRAINING = "drafter.training={learning_rate: 0.002, batch_tokens: 256}"
"""Micro-steps that fit a core: 2,048 tokens, the default, are seconds of one."""

ARMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "suffix": ("default", ()),
    "long_tail": ("long_tail", (TRAINING, "drafter.publish_every=10", "drafter.capture.share=0.05")),
    "long_tail, one head": (
        "long_tail",
        (TRAINING, "drafter.publish_every=10", "drafter.capture.share=0.05", "drafter.mode=dedicated"),
    ),
    "trained, never swapped": (
        "long_tail",
        (TRAINING, "drafter.publish_every=1000000", "drafter.capture.share=0.05"),
    ),
    "not trained": ("long_tail", ("drafter.mode=off",)),
}
"""Preset and overrides. In `long_tail` the head is trained on one replica's device while that replica idles; in the
third at any time, as on a device of its own. The last two draft alike, with the fresh head; they differ by capture and
training."""

GAIN, COST = 1.15, 1.01
"""Generation time of suffix over long_tail, at least; step time of trained over not trained, at most."""

COUNTS = ("captured", "train_steps", "train_tokens", "swaps", "promoted", "rolled_back", "preempted",
          "idle_seconds", "used_seconds", "capture_seconds")  # fmt: skip


def _job(settings: JobSettings, assets: Assets, place: Path, arm: str) -> Job:
    preset, overrides = ARMS[arm]
    same = ("mode=coupled", f"coupled.seed={settings.seed}")
    own = tuple(o.replace("{folder}", str(place)) for o in overrides)
    return build_job(settings, assets, place, speculate=True, preset=preset, overrides=(*own, *same))


def train(job: Job, on_step: OnStep) -> None:
    """Run a job."""
    run_job(job, timeout=2400, stall=900, on_step=on_step)


def read(run: Run) -> dict[str, Any]:
    """The series of a run, per training step."""
    drafter = {name: [v or 0.0 for v in run.series(f"rollspec/drafter/{name}")] for name in COUNTS}
    return {
        "epoch": run.epochs,
        "lengths": [sorted(lengths) for lengths in run.lengths],  # replicas finish in any order
        "gen": run.series(GEN),
        "step": run.series(STEP_TIME),
        "reward": run.series(*REWARD),
        "drafted": run.series("rollspec/accept/drafted"),
        "accepted": run.series("rollspec/accept/accepted"),
        "drafted_eagle3": run.series("rollspec/accept/drafted/eagle3"),
        "rate_eagle3": run.series("rollspec/accept/rate/eagle3"),
        "head_length": run.series("rollspec/drafter/accept_length"),
        "train_length": run.series("rollspec/drafter/train_length"),
        "loss": run.series("rollspec/drafter/loss"),
        "preempt_seconds": run.series("rollspec/drafter/preempt_seconds"),
        "preempt_p99_seconds": run.series("rollspec/drafter/preempt_p99_seconds"),
        "micro_step_seconds": run.series("rollspec/drafter/micro_step_seconds"),
        "faults": run.series("rollspec/faults"),
        **drafter,
    }


def compare(one: dict[str, Any], other: dict[str, Any], name: str, part: slice) -> tuple[list[float], list[float]]:
    """Seconds `name` of the steps in `part`: of `one`, and of `other`."""
    pairs = [(a, b) for a, b in zip(one[name][part], other[name][part], strict=True) if a is not None and b is not None]
    return [a for a, _ in pairs], [b for _, b in pairs]


def summarise(runs: dict[str, dict[int, dict[str, Any]]]) -> dict[str, Any]:
    """What the arms say of the two goals; empty where an arm of a pair is missing."""
    out: dict[str, Any] = {"arms": {}}
    for arm, seeds in runs.items():
        total = {name: sum(sum(f[name]) for f in seeds.values()) for name in COUNTS}
        idle = total["idle_seconds"]
        out["arms"][arm] = {
            "seeds": sorted(seeds),
            "gen_seconds": {s: sum(f["gen"]) for s, f in seeds.items()},
            "step_seconds": {s: sum(f["step"]) for s, f in seeds.items()},
            **total,
            "used": total["used_seconds"] / idle if idle else None,
            "preempt_seconds": _last(seeds, "preempt_seconds"),
            "preempt_p99_seconds": _last(seeds, "preempt_p99_seconds"),
            "micro_step_seconds": _last(seeds, "micro_step_seconds"),
            "head_length": _last(seeds, "head_length"),
            "faults": sum(v or 0.0 for f in seeds.values() for v in f["faults"]),
        }
    out["head_and_suffix_over_suffix"] = _pairs(runs, "suffix", "long_tail", "gen", GAIN, most=False)
    out["one_head_and_suffix_over_suffix"] = _pairs(runs, "suffix", "long_tail, one head", "gen", GAIN, most=False)
    out["training_while_idle"] = _pairs(runs, "trained, never swapped", "not trained", "step", COST, most=True)
    return out


def _last(seeds: dict[int, dict[str, Any]], name: str) -> float | None:
    """The largest, over seeds, of what a job said last."""
    said = [[v for v in f[name] if v is not None] for f in seeds.values()]
    return max((values[-1] for values in said if values), default=None)


def _pairs(
    runs: dict[str, dict[int, dict[str, Any]]], above: str, below: str, name: str, goal: float, most: bool
) -> dict[str, Any] | None:
    seeds = sorted(runs.get(above, {}).keys() & runs.get(below, {}).keys())
    if not seeds:
        return None
    out: dict[str, Any] = {"goal": goal, "seeds": seeds}
    same = [a == b for s in seeds for a, b in zip(*(runs[arm][s]["lengths"] for arm in (above, below)), strict=True)]
    out["same_lengths"] = sum(same) / len(same)
    for part in ("first epoch", "second half", "all"):
        tops: list[float] = []
        bottoms: list[float] = []
        for s in seeds:
            n, epochs = len(runs[above][s]["gen"]), runs[above][s]["epoch"]
            chosen = {"first epoch": slice(0, epochs.count(0)), "second half": slice(n // 2, n), "all": slice(0, n)}
            a, b = compare(runs[above][s], runs[below][s], name, chosen[part])
            tops += a
            bottoms += b
        found = ratio(tops, bottoms)
        out[part] = {"pairs": found, "sums": sum(tops) / sum(bottoms), "verdict": verdict(found, goal, most)}
    return out


def table(summary: dict[str, Any]) -> Table:
    """For people."""
    t = Table(title="long_tail in whole jobs, two replicas")
    for column in ("", "goal", "first epoch", "second half", "all", "verdict"):
        t.add_column(column, justify="right" if column else "left")
    rows = (
        ("head_and_suffix_over_suffix", "generation: suffix / long_tail", f">= {GAIN}", "second half"),
        ("one_head_and_suffix_over_suffix", "generation: suffix / long_tail, one head", f">= {GAIN}", "second half"),
        ("training_while_idle", "step time: trained / not trained", f"<= {COST}", "all"),
    )
    for key, label, goal, judged in rows:
        if found := summary[key]:
            cells = [_cell(found[part]["pairs"]) for part in ("first epoch", "second half", "all")]
            t.add_row(label, goal, *cells, found[judged]["verdict"])
    made = [
        f"{arm}: {a['train_steps']:.0f} training steps in {_used(a):.0f} of {a['idle_seconds']:.0f} "
        f"idle s, {a['swaps']:.0f} swaps, {a['head_length'] or 0:.2f} tokens by its drafts; a step takes "
        f"{a['micro_step_seconds'] or 0:.2f} s, pre-emption {a['preempt_p99_seconds'] or 0:.2f} s (p99)"
        for arm, a in summary["arms"].items()
        if a["idle_seconds"]
    ]
    t.caption = "\n".join(made)
    return t


def _cell(found: Ratio) -> str:
    return f"{found.median:.3f} ({found.low:.3f}-{found.high:.3f})"


def run(
    quick: bool = False,
    seeds: Sequence[int] = (0,),
    arms: Sequence[str] = tuple(ARMS),
    work: Path | None = None,
    out: Path | None = None,
) -> Path:
    """Run what is missing, print and save the comparison of all that is finished."""
    pin()
    console = Console(stderr=True)
    settings = SETTINGS
    if quick:
        settings = dataclasses.replace(SETTINGS, size="tiny", train_prompts=8, prompts_per_step=4, epochs=2)
        seeds = tuple(seeds)[:1]
        console.print(QUICK)
    work = work or CACHE / ("long-tail-quick" if quick else "long-tail")
    began = provenance()
    run_missing(of_seeds(seeds, arms, work, settings, _job), train, console)
    runs: dict[str, dict[int, Any]] = {}
    for arm, seed, job in finished(of_seeds(seeds_in(work), tuple(ARMS), work, settings, _job), console):
        runs.setdefault(arm, {})[seed] = read(load_run(job.folder))
    summary = summarise(runs)
    console.print(table(summary))
    return save(
        "long_tail" + ("-quick" if quick else ""),
        {
            "benchmark": "long_tail",
            "provenance": began,
            "settings": dataclasses.asdict(settings),
            "arms": {name: {"preset": preset, "overrides": more} for name, (preset, more) in ARMS.items()},
            "summary": summary,
            "runs": runs,
        },
        out,
    )


def _used(arm: dict[str, Any]) -> float:
    """Idle seconds that training used; older results have another name for them."""
    return float(arm["used_seconds"] if "used_seconds" in arm else arm["harvested_seconds"])
