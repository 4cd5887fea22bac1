"""`rollspec demo`: one small GRPO job on this machine, without and with rollspec, then a page that compares them.

rollspec demo
rollspec demo --size tiny --steps 4 --only rollspec
rollspec demo --preset suffix_only --set proposal.k_max=8 --out runs/mine
rollspec demo --model smollm2 --steps 12
"""

from __future__ import annotations

import json
import math
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from examples.cache import home
from examples.demo.budget import Budget
from examples.demo.job import REAL, ROOT, Job, JobSettings, build_job, prepare_assets, require_programs
from examples.demo.live import Display, RunView, clock
from examples.demo.runner import JobFailed, JobResult, MetricsTail, finished_run, provenance_of, run_job
from examples.demo.warm import warm_up
from examples.models import resolve as model_folder
from rollspec.config import resolve
from rollspec.errors import RollspecError
from rollspec.machine import native_dtype
from rollspec.telemetry.runs import METRICS, REPEATS, Row, load_run

RUNS = ("baseline", "rollspec")
RESULTS = ROOT / "benchmarks" / "results"
CONTROL = RESULTS / "control.json"  # of `rollspec bench control`
MINUTES = 15.0  # of a demonstration whose size was not asked for
FAILED = 1
INTERRUPTED = 130  # as a shell reports Ctrl-C
SLOW_PROMPTS = 12  # where a training step takes 25 s instead of 8
JOB_SECONDS = 3600.0  # bound of one run; one that hangs is found by its steps, long before
REAL_SECONDS, REAL_STALL = 12 * JOB_SECONDS, 1800.0  # of a run with a real model: hours, and minutes a step


@dataclass(frozen=True)
class Plan:
    """What one call of the command will run."""

    settings: JobSettings
    out: Path
    names: tuple[str, ...]  # baseline, rollspec, or one of them
    preset: str
    overrides: tuple[str, ...]
    minutes: float | None = None  # that everything may take


def command(
    out: Annotated[Path | None, typer.Option(help="Folder of the runs; default runs/demo-<time>.")] = None,
    steps: Annotated[int | None, typer.Option(help="Stop each run after so many training steps.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="PATH|HUB|smollm2",
            help="Train this causal language model on small tasks (word problems, lists, JSON) instead of the "
            "example's policy; `smollm2` is made on its first use. A step of SmolLM2-135M takes minutes on two cores.",
        ),
    ] = None,
    size: Annotated[Literal["demo", "tiny"], typer.Option(help="Size of the policy; `tiny` is for tests.")] = "demo",
    prompts: Annotated[
        int | None,
        typer.Option(
            min=4,
            help="Training prompts, each seen in every epoch; default 32, and 12 on a CPU without bfloat16 arithmetic, "
            "where 32 take half an hour.",
        ),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Times that each prompt is seen; 1: fresh prompts only.")] = 4,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="End both runs after as many whole epochs as fit, two at least; default 15, and no bound where the "
            "size of the job was given."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of policy, prompts and sampling.")] = 0,
    replicas: Annotated[
        int,
        typer.Option(help="Engines that share the rollout; with 2 one can train the drafter while the other works."),
    ] = 1,
    only: Annotated[Literal["baseline", "rollspec"] | None, typer.Option(help="Run just one of the two.")] = None,
    preset: Annotated[str, typer.Option(help="Preset or YAML file of the rollspec run.")] = "default",
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a knob; may be repeated.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the numbers as JSON; progress goes to stderr.")
    ] = False,
    html: Annotated[bool, typer.Option("--html/--no-html", help="Write the HTML page.")] = True,
) -> None:
    """Train a small policy on this machine without and with rollspec and compare the two runs (about 15 minutes)."""
    require_programs()
    if minutes is None and (steps, model, prompts, epochs, replicas, size) == (None, None, None, 4, 1, "demo"):
        minutes = MINUTES
    plan = Plan(
        settings=settings_for(
            native_dtype(), prompts, model, size=size, seed=seed, steps=steps, epochs=epochs, replicas=replicas
        ),
        out=(out or ROOT / "runs" / f"demo-{datetime.now():%Y%m%d-%H%M%S}").resolve(),
        names=(only,) if only else RUNS,
        preset=preset,
        overrides=tuple(overrides or ()),
        minutes=minutes,
    )
    resolve(preset, overrides=plan.overrides, env={})  # refuse a typo before anything is run
    console, began, status = Console(stderr=as_json), time.monotonic(), 0
    try:
        run_plan(plan, Display(console))
    except JobFailed as e:
        console.print(f"\n[dim]{escape(e.tail)}[/dim]\n", highlight=False, soft_wrap=True)
        typer.echo(str(e), err=True)
        status = FAILED
    except KeyboardInterrupt:
        console.print(f"stopped; nothing of the job is left running. Resume with --out {plan.out}", highlight=False)
        status = INTERRUPTED
    if not status or any(steps_done(plan.out / name) for name in RUNS):
        numbers = conclude(plan.out, console, html)
        if as_json:
            sys.stdout.write(json.dumps(numbers, indent=2) + "\n")
    console.print(f"in all: {clock(time.monotonic() - began)}", highlight=False)
    if status:
        raise typer.Exit(status)


def settings_for(dtype: str, prompts: int | None, model: str | None = None, **given: Any) -> JobSettings:
    """The job that finishes in about 15 minutes here, or one with the prompts or the model that were asked for.

    Raises:
        RollspecError: the prompts do not fill steps, the model cannot be used, or it has a size of its own.
    """
    real = REAL if model is not None else {}
    step = real.get("prompts_per_step", JobSettings.prompts_per_step)
    if prompts is not None and prompts % step:
        raise RollspecError(f"rollspec: --prompts {prompts} does not fill steps of {step}; give a multiple of it.")
    if prompts is None:
        prompts = JobSettings.train_prompts if dtype == "bfloat16" else SLOW_PROMPTS
    if model is not None and given.get("size") == "tiny":
        raise RollspecError("rollspec: --size tiny is a size of the example's policy; leave it out beside --model.")
    settings = JobSettings(**{**real, **given, "dtype": dtype, "train_prompts": prompts})
    return replace(settings, model=str(model_folder(model))) if model is not None else settings


def run_plan(plan: Plan, display: Display) -> None:
    """Run what `plan` names, skipping a baseline that was finished with the same settings."""
    display.say(f"runs go to {plan.out}")
    s = plan.settings
    bound = math.inf if plan.minutes is None else 60 * plan.minutes
    budget = Budget(bound, len(plan.names), s.steps_per_epoch)
    if s.model:
        display.say(f"model: {s.model}")
    size = f"{s.train_prompts} prompts x {s.n} samples, {s.epochs} epochs"
    display.say(f"{size}, {s.dtype}: {s.total_steps} training steps a run")
    display.say("preparing the policy and the prompts")
    assets = prepare_assets(s, home() / s.example)
    jobs = [
        build_job(
            plan.settings,
            assets,
            plan.out / name,
            speculate=name == "rollspec",
            preset=plan.preset,
            overrides=plan.overrides,
        )
        for name in plan.names
    ]
    if s.size != "tiny":
        display.say("warming up: an engine fills the caches that both runs then find")
        if wrong := warm_up(assets.model, s.dtype, jobs[-1].environment):
            display.say(f"not warmed up ({escape(wrong)}): the first run may begin slower than the second")
    estimate: float | None = None
    for job in jobs:
        if job.name == "baseline" and finished_run(job.folder, job.settings_hash):
            display.say(f"baseline: already finished with these settings in {job.folder}, not run again")
            estimate, budget.steps = _recorded_seconds(job.folder), steps_done(job.folder)
            continue
        result = _run(job, display, estimate, budget)
        estimate, budget.steps = result.seconds, result.steps
    link_latest(plan.out)


def conclude(out: Path, console: Console, html: bool) -> dict[str, Any]:
    """Print the comparison of the runs in `out`, as far as they came, and write the page; the numbers."""
    from rollspec.telemetry.report import report_json, table, write_report  # loads matplotlib

    add_repeats(out / "baseline")
    done = {name: n for name in RUNS if (n := steps_done(out / name))}
    found = {name: load_run(out / name) for name in done}
    if not found:
        raise RollspecError(f"rollspec: {out} holds no run with a finished step; run `rollspec demo` again.")
    for name, n in done.items():
        if (status := provenance_of(out / name).get("status")) != "finished":
            steps = "step" if n == 1 else "steps"
            console.print(f"{name} did not finish ({status}): the numbers are of its {n} {steps}", highlight=False)
    main = found.get("rollspec") or found["baseline"]
    base = found.get("baseline") if main.name != "baseline" else None
    control = None if base is None else null_control()
    if html:
        page, numbers = write_report(main.folder, [base.folder] if base is not None else None, out, control)
    else:
        numbers = report_json(main, base, control)
        (out / "report.json").write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    shown = Table(header_style="bold", pad_edge=False)
    shown.add_column("")
    for run in (base, main):
        if run is not None:
            shown.add_column(run.name, justify="right")
    shown.add_column("change" if base is not None else "", justify="right")
    for label, cells, change in table(numbers):
        shown.add_row(label, *cells, change)
    console.print()
    console.print(shown)
    console.print(f"[bold]{numbers['headline']}[/bold]", highlight=False, soft_wrap=True)
    for sentence in filter(None, (numbers["limits_sentence"], control)):
        console.print(sentence, highlight=False, soft_wrap=True)
    if (compared := numbers["comparison"]) and compared["timed"] < compared["steps"]:
        console.print("ratios leave the first step out, totals have it", highlight=False)
    if html:
        console.print(f"report: {page}", highlight=False, soft_wrap=True)
    return numbers


def steps_done(folder: Path) -> int:
    """Training steps that the run in `folder` finished, whatever its settings and however it ended."""
    return len(MetricsTail(folder / METRICS).read()) if provenance_of(folder) else 0


def add_repeats(baseline: Path) -> None:
    """Put the measured pairs of runs without rollspec beside a baseline of the same job, for the report."""
    settings = provenance_of(baseline).get("settings") or {}
    for path in sorted(RESULTS.glob("repeats*.json")):  # of `rollspec bench repeats`, one for each number format
        known = json.loads(path.read_text(encoding="utf-8"))
        if all(settings.get(name) == value for name, value in known["settings"].items()):
            (baseline / REPEATS).write_text(json.dumps({"groups": known["groups"]}) + "\n", encoding="utf-8")


def null_control() -> str | None:
    """What `rollspec bench control` measured last, in a sentence; None where there is no result."""
    try:
        found = json.loads(CONTROL.read_text(encoding="utf-8"))
        made = found["provenance"]
        speeds = [
            f"{1 / r['median']:.2f}× ({1 / r['high']:.2f}–{1 / r['low']:.2f}) at batch {batch}"
            for batch, r in found["on_over_off"].items()
        ]
        stale = ", stale" if found.get("stale") else ""
        return f"null control, nothing drafted: {', '.join(speeds)} ({made['cpu']}, {made['git'][:8]}{stale})"
    except (OSError, ValueError, KeyError, TypeError):
        return None


def link_latest(out: Path) -> None:
    """Point `runs/latest` at `out` where `out` lies in a folder named runs."""
    if out.parent.name != "runs":
        return
    link = out.parent / "latest"
    with suppress(OSError):  # a file system without links, or someone's own folder of that name
        if link.is_symlink() or not link.exists():
            link.unlink(missing_ok=True)
            link.symlink_to(out.name, target_is_directory=True)


def _run(job: Job, display: Display, estimate: float | None, budget: Budget) -> JobResult:
    view = RunView(job.name, min(job.total_steps, budget.steps or job.total_steps), estimate)

    def step(row: Row) -> None:
        budget.step()
        display.step(row)

    budget.start()
    with display.watching(view):
        bounds = (
            {"timeout": REAL_SECONDS, "stall": REAL_STALL} if job.settings.get("model") else {"timeout": JOB_SECONDS}
        )
        result = run_job(job, **bounds, on_step=step, on_tick=display.tick, enough=budget.enough)
    display.say(f"{job.name}: {result.steps} steps in {clock(result.seconds)}")
    if result.steps < job.total_steps and budget.steps is None:
        display.say(
            f"that is {result.steps} of {job.total_steps}: as many whole epochs as both runs can have in "
            f"{budget.seconds / 60:g} minutes (--minutes)"
        )
    return result


def _recorded_seconds(folder: Path) -> float | None:
    with suppress(TypeError, ValueError, KeyError):
        return float(provenance_of(folder)["wall_seconds"])
    return None
