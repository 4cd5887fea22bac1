"""`rollspec bench`: runs the benchmarks and prints where the JSON went."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from benchmarks.options import names, numbers
from drafter_online.errors import DrafterError
from rollspec.errors import RollspecError

NAMES = (
    "propose", "inert", "control", "bandits", "scale", "cost", "harm", "tuner", "swap", "serve", "reuse",
    "long-tail", "training", "lengths", "repeats",
)  # fmt: skip


class _Group(TyperGroup):
    """What the trainer's readers refuse, prompts or a checkpoint, is one sentence here as well."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except DrafterError as e:
            raise RollspecError(f"rollspec: {e.plain}") from e


command = typer.Typer(
    cls=_Group, help="Run the benchmarks: alternating runs, ratios with their spread, JSON with provenance."
)

Seeds = Annotated[str, typer.Option(help="Seeds of the jobs, separated by commas.")]
Arms = Annotated[str | None, typer.Option(help="Some of the arms, separated by semicolons; default: all.")]
Prompts = Annotated[
    Path | None, typer.Option(help="JSONL, Parquet or text, as `make-head` reads it; built in when left out.")
]
Work = Annotated[
    Path | None, typer.Option(file_okay=False, help="Folder of the jobs; finished ones are not run again.")
]
Quick = Annotated[bool, typer.Option("--quick", help="Show that it runs; the numbers mean nothing.")]
Out = Annotated[Path | None, typer.Option("--out", help="JSON file; default benchmarks/results/NAME.json.")]
Json = Annotated[bool, typer.Option("--json", help="Print the JSON on stdout.")]
Towards = Annotated[
    Path | None, typer.Option(exists=True, file_okay=False, help="Later checkpoint of it, that its epochs move to.")
]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="PATH|HUB|smollm2",
        help="Causal language model to measure, default the demo's policy; the JSON is then NAME-MODEL.json.",
    ),
]


def _module(name: str) -> Any:
    return importlib.import_module(f"benchmarks.{name}")


def _model(name: str | None) -> Path | None:
    from examples.models import resolve

    return resolve(name) if name else None


def _file(name: str, model: str, quick: bool) -> Path:
    """Where the result goes with a model: beside that of the demo's policy, not over it."""
    from benchmarks.harness import RESULTS

    short = re.sub(r"[^a-z0-9.]+", "-", Path(model).name.lower()).strip("-.") or "model"
    return RESULTS / f"{name}-{short}{'-quick' if quick else ''}.json"


def _given(**values: Any) -> dict[str, Any]:
    """What was given on the command line; for the rest the benchmark's own defaults hold."""
    return {name: value for name, value in values.items() if value is not None}


def _jobs(name: str, seeds: str, arms: str | None) -> dict[str, Any]:
    """Which jobs a benchmark of whole jobs runs."""
    return {"seeds": numbers("--seeds", seeds), "arms": names("--arms", arms, _module(name).ARMS, ";")}


def _sizes(text: str) -> tuple[int, ...]:
    return numbers("--batches", text, 1, 64)  # the engines run 64 at most


def _measure(
    name: str, json: bool, out: Path | None, model: str | None = None, quick: bool = False, **options: Any
) -> None:
    """Run a benchmark with its options, and print where its JSON went."""
    if model is not None:
        options["model"], out = _model(model), out or _file(name, model, quick)
    _done(_module(name).run(quick=quick, out=out, **options), json)


def _done(path: Path, as_json: bool) -> None:
    typer.echo(f"written: {path}", err=True)
    if as_json:
        typer.echo(path.read_text())


@command.command()
def propose(quick: Quick = False, out: Out = None, json: Json = False) -> None:
    """Host time of drafting, without an engine (seconds)."""
    _measure("propose", json, out, quick=quick)


@command.command()
def inert(quick: Quick = False, out: Out = None, json: Json = False) -> None:
    """Cost of the installed plugin in an engine that did not ask for it (minutes)."""
    _measure("inert", json, out, quick=quick)


@command.command()
def control(
    quick: Quick = False,
    out: Out = None,
    json: Json = False,
    model: Model = None,
    starts: Annotated[int, typer.Option(min=1, help="Pairs: how often engines are started anew.")] = 8,
    head: Annotated[
        Path | None,
        typer.Option(
            exists=True, file_okay=False, help="What training this head of --model costs its engine, instead."
        ),
    ] = None,
    batches: Annotated[str | None, typer.Option(help="Batch sizes, separated by commas (4,32,64).")] = None,
) -> None:
    """An engine with rollspec on and nothing drafted against one without it (minutes)."""
    if head is not None and model is None:
        raise RollspecError("rollspec: --head is a head of --model; give both.")
    if head is not None:
        out = out or _file("control-head", str(model), quick)
    sizes = _sizes(batches) if batches else ()
    _measure("control", json, out, model, quick=quick, starts=starts, head=head, batches=sizes)


@command.command()
def head(
    model: Annotated[str, typer.Option(metavar="PATH|HUB|smollm2", help="The target.")],
    head: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Its head, of `drafter-online make-head`.")],
    quick: Quick = False,
    out: Out = None,
    json: Json = False,
    prompts: Prompts = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Alternating rounds per batch size.")] = None,
    batches: Annotated[str | None, typer.Option(help="Batch sizes, separated by commas.")] = None,
    arms: Arms = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Of each prompt; with 1 a prompt has no sibling.")] = None,
    seeds: Annotated[str, typer.Option(help="Of prompts' order and of engines, which each starts anew.")] = "0",
    epochs: Annotated[
        int | None, typer.Option(min=1, max=8, help="Of a round's prompts: fresh, then repeated; default 2.")
    ] = None,
    held_out: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="--out of a make-head; prompts it trained on are left out."),
    ] = None,
) -> None:
    """What a draft head adds to a real model: none, suffix drafts, both; new and old prompts (an hour).

    `head, 4 passes`, `head, coupled greedy`, `head, trained` and `head, idle` are further --arms.
    """
    chosen = names("--arms", arms, _module("head").ARMS, ";") if arms else None
    given = _given(rounds=rounds, batches=_sizes(batches) if batches else None, arms=chosen, samples=samples)
    given |= _given(seeds=numbers("--seeds", seeds), epochs=epochs, held_out=held_out)
    _measure("head", json, out, model, quick=quick, head=head, prompts=prompts, **given)


@command.command()
def peers(
    model: Model = None,
    towards: Towards = None,
    prompts: Prompts = None,
    head: Annotated[
        list[Path] | None,
        typer.Option(exists=True, file_okay=False, help="Of `drafter-online make-head`; may be given twice (taps)."),
    ] = None,
    arms: Annotated[str | None, typer.Option(help="Some of the arms, separated by commas; `ngram` is each K.")] = None,
    workloads: Annotated[str | None, typer.Option(help="Of epochs, fresh, shift and full; by commas.")] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.1, help="Budget: fewer pairs, then fewer arms, where it does not hold all.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Most pairs of an arm at a workload.")] = None,
    out: Out = None,
    json: Json = False,
) -> None:
    """Every published method on one engine, side by side, over four workloads (hours; resumes where it was)."""
    found = _given(minutes=minutes, seeds=seeds)
    heads = tuple(head or ())
    _done(_module("peers").run(_model(model), towards, prompts, heads, arms, workloads, out=out, **found), json)


@command.command()
def swap(quick: Quick = False, out: Out = None, json: Json = False) -> None:
    """Pauses that swaps of drafter weights make, and what capturing samples costs (minutes)."""
    _measure("swap", json, out, quick=quick)


@command.command()
def serve(
    quick: Quick = False,
    out: Out = None,
    json: Json = False,
    requests: Annotated[int, typer.Option(min=1, help="With swaps, and as many without.")] = 10_000,
) -> None:
    """A `vllm serve` under load while its drafter is replaced every few seconds (minutes)."""
    _measure("serve", json, out, quick=quick, requests=requests)


@command.command()
def reuse(
    quick: Quick = False,
    out: Out = None,
    json: Json = False,
    seeds: Seeds = "0,1,2",
    arms: Arms = None,
    prompts: Annotated[int, typer.Option(help="Prompts of an epoch, a multiple of 8.")] = 32,
    work: Work = None,
) -> None:
    """Reuse of past rollouts in the demo's job: drafts, kept noise, SPEC-RL's lossy prefixes (an hour: 15 jobs)."""
    _measure("reuse", json, out, quick=quick, **_jobs("reuse", seeds, arms), prompts=prompts, work=work)


@command.command(name="long-tail")
def long_tail(
    quick: Quick = False,
    out: Out = None,
    json: Json = False,
    seeds: Seeds = "0",
    arms: Arms = None,
    work: Work = None,
) -> None:
    """Draft head and suffix drafts against these alone, and what idle training costs, in whole jobs (half an hour)."""
    _measure("long_tail", json, out, quick=quick, **_jobs("long_tail", seeds, arms), work=work)


@command.command()
def lengths(
    quick: Quick = False,
    out: Out = None,
    json: Json = False,
    dtypes: Annotated[str, typer.Option(help="Number formats, separated by commas.")] = "bfloat16,float32",
    seed: Annotated[int, typer.Option(help="Of both engines' sampling.")] = 0,
) -> None:
    """Does drafting change how long responses get? One fixed policy, natural ends (ten minutes)."""
    _measure("lengths", json, out, quick=quick, dtypes=names("--dtypes", dtypes, _module("lengths").DTYPES),
             seed=seed)  # fmt: skip


@command.command()
def repeats(
    quick: Quick = False,
    out: Out = None,
    json: Json = False,
    seeds: Seeds = "0,1,2,3,4",
    arms: Annotated[
        str | None, typer.Option(help="Runs of each seed, separated by semicolons (without;again;with); default: all.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps of a job; default: all of the demo's.")] = None,
    work: Work = None,
) -> None:
    """Do lengths and rewards of a job shift? Pairs without/without and without/with (an hour and a half: 15 jobs)."""
    _measure("repeats", json, out, quick=quick, **_jobs("repeats", seeds, arms), **_given(steps=steps), work=work)


@command.command()
def bandits(quick: Quick = False, out: Out = None, json: Json = False) -> None:
    """What tuning strategies lose in simulated environments whose best arm is known (a minute)."""
    _measure("bandits", json, out, quick=quick)


@command.command()
def scale(
    quick: Quick = False,
    out: Out = None,
    json: Json = False,
    measured: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Take the measured costs from this earlier result."),
    ] = None,
) -> None:
    """Versions, canaries and feedback over 8 to 1,024 replicas, simulated; where the design stops (a minute)."""
    _measure("scale", json, out, quick=quick, measured_in=measured)


@command.command()
def cost(
    quick: Quick = False,
    out: Out = None,
    json: Json = False,
    model: Model = None,
    store: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Keep the fit in this folder; a job with history.dir there starts from it."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=2, help="Times that each cell is measured.")] = 3,
) -> None:
    """Time of an engine step over requests and draft length; the fit, its error, the knee, a picture (minutes)."""
    _measure("cost", json, out, model, quick=quick, rounds=rounds, keep_in=store)


@command.command()
def harm(
    quick: Quick = False,
    out: Out = None,
    json: Json = False,
    model: Model = None,
    rounds: Annotated[int, typer.Option(min=1, help="Alternating jobs per scenario.")] = 10,
    batches: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "64",
    scenarios: Annotated[str | None, typer.Option(help="Of unpredictable and useless; default: both.")] = None,
    head: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="A draft head beside the suffix drafts.")
    ] = None,
) -> None:
    """Do no harm: rollspec against none and its null control on unpredictable text, and with a useless drafter.

    A quarter of an hour for the demo's policy at one batch size.
    """
    given = _given(scenarios=names("--scenarios", scenarios, _module("harm").SCENARIOS) if scenarios else None)
    _measure("harm", json, out, model, quick=quick, rounds=rounds, batches=_sizes(batches), head=head, **given)


@command.command()
def tuner(
    quick: Quick = False,
    out: Out = None,
    json: Json = False,
    model: Model = None,
    towards: Towards = None,
    prompts: Prompts = None,
    rounds: Annotated[int, typer.Option(min=1, help="Alternating rounds over all arms.")] = 3,
    strategies: Annotated[str | None, typer.Option(help="Arms, by commas (hedge,K=4,oracle); default: all.")] = None,
    batches: Annotated[str | None, typer.Option(help="Sizes it stays at (1,4,16,64); else it falls.")] = None,
) -> None:
    """A batch that falls from 64 to 1: the tuner against fixed K, bandits and the oracle (a quarter of an hour)."""
    chosen = names("--strategies", strategies, _module("tuner").ARMS) if strategies else None
    steady = _sizes(batches) if batches else ()
    if model and steady:
        out = out or _file("tuner-steady", model, quick)
    moved = _given(towards=towards, prompts=prompts)
    _measure("tuner", json, out, model, quick, rounds=rounds, strategies=chosen, batches=steady, **moved)


@command.command()
def training(quick: Quick = False, out: Out = None, json: Json = False, model: Model = None) -> None:
    """Processor time and memory of a micro-step of draft head training, and where they go (a minute)."""
    _measure("training", json, out, model, quick=quick)


@command.command()
def real(
    work: Annotated[Path, typer.Option(file_okay=False, help="Folder of what is made first: an hour, once.")],
    only: Annotated[str | None, typer.Option(help="Benchmarks, separated by commas; default: stale ones.")] = None,
    minutes: Annotated[float | None, typer.Option(min=1, help="Of peers, the longest; default 120.")] = None,
) -> None:
    """Every result of SmolLM2-135M: warmed up, with a head, then peers, control, head, tuner and more (hours)."""
    for path in _module("real").run(work, only, **_given(minutes=minutes)):
        typer.echo(f"written: {path}", err=True)


@command.command()
def gpu(
    minutes: Annotated[float, typer.Option(min=0.1, help="Budget; what does not fit is left out and said.")] = 20.0,
    device: Annotated[str, typer.Option(help="cuda, or cpu for a dry run that claims nothing.")] = "cuda",
    no_vllm: Annotated[bool, typer.Option("--no-vllm", help="Only the parts that need no vLLM.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what an earlier run finished.")] = False,
    only: Annotated[
        str, typer.Option(help="Parts, or the beginnings of their names, separated by commas (start,exact).")
    ] = "",
    model: Model = None,
    head: Annotated[Path | None, typer.Option(exists=True, file_okay=False, help="A head of --model.")] = None,
    prompts: Prompts = None,
    out: Out = None,
    json: Json = False,
) -> None:
    """What rollspec claims on a GPU, measured on this one, in one JSON and one page (minutes)."""
    if device not in ("cuda", "cpu"):
        raise RollspecError(f"rollspec: --device {device!r} is neither cuda nor cpu; give one of them.")
    suite, names = _module("gpu.suite"), tuple(n.strip() for n in only.split(",") if n.strip())
    options = suite.Options(minutes, device, not no_vllm, fresh, names, _model(model), head, prompts, out=out)
    written = suite.run(options)
    _module("gpu.__main__").show(written, json)


@command.command(name="all")
def all_(
    quick: Quick = False,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the JSON files.")] = None,
    json: Json = False,
) -> None:
    """Every benchmark but head, peers and real, which take a model, and gpu (hours)."""
    for name in NAMES:
        module = name.replace("-", "_")
        _measure(module, json, out / f"{module}.json" if out else None, quick=quick)
