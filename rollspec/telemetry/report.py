"""One self-contained HTML page about a run, alone or against a baseline, and the same numbers as JSON.

    page, numbers = write_report("runs/latest/rollspec", baseline="runs/latest/baseline")
    print(numbers["headline"])     # generation 1.62x faster from the second epoch on; reward and lengths ...

`rollspec report RUN [--baseline RUN ...]` is the command. The page has no external assets and no script; it follows the
reader's light or dark setting. A metric that a run does not carry leaves a sentence in its place.
"""

from __future__ import annotations

import json
import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import jinja2
import typer

from drafter_online import files
from rollspec.errors import RollspecError
from rollspec.telemetry.figures import figures, number
from rollspec.telemetry.runs import Run, find_pair, load_run
from rollspec.telemetry.sinks import plain
from rollspec.telemetry.summary import REGRETS_PART, Numbers, calibration, compare, limits, summarize

ROWS = (  # of the table: what, its name in the JSON, its form
    ("Generation, total", "gen_total", "s"),
    ("Generation per step, median", "gen_median", "s"),
    ("Tokens per second", "tokens_per_second", ""),
    ("Response tokens", "tokens", "n"),
    ("Acceptance length", "accept_length", ".2f"),
    ("Acceptance rate", "accept_rate", "%"),
    ("Cost of proposing", "propose_share", "%"),
    ("Training step, median", "step_median", "s"),
    ("Generation's share of the step", "gen_share", "%"),
    ("Mean reward, start", "reward_first", ".3f"),
    ("Mean reward, end", "reward_last", ".3f"),
    ("Response length, mean", "length_mean", ""),
    ("Response length, p50", "length_p50", "n"),
    ("Response length, p90", "length_p90", "n"),
    ("Response length, p99", "length_p99", "n"),
    ("Response length, max", "length_max", "n"),
    ("Responses cut at the limit", "clip_ratio", "%"),
)


LIMITS = (
    "Of decoding alone, by the engine's cost model, you got {got:.2f}×; the best fixed setting ({best_fixed_arm}) "
    "would have got {best_fixed:.2f}×; the oracle {oracle:.2f}×; a perfect drafter on this machine {perfect:.2f}×."
)
PARTS = (
    f" The two differ by more than {100 * REGRETS_PART:.0f} points: the cost model is off for some arm, and the draft "
    "lengths it chose may not be the best."
)


def write_report(
    run: str | Path,
    baseline: str | Path | Sequence[str | Path] | None = None,
    out: str | Path | None = None,
    null_control: str | None = None,
) -> tuple[Path, Numbers]:
    """Write the page and, beside it, its numbers as JSON; the page's path, and the numbers.

    Args:
        run: run folder, or a folder with `baseline/` and `rollspec/` inside (as the demo leaves them).
        baseline: run folder to compare with; of the same job, so that steps correspond. Of several the first is
            compared with, and all of them tell how far runs of this job differ by chance.
        out: the HTML file, or a folder for `report.html`; beside the runs when None. JSON goes next to it.
        null_control: a sentence on what an engine takes in which nothing is drafted, to stand beside the ratios.

    Raises:
        RollspecError: a folder or file is missing, empty or corrupted, or the output cannot be written.
    """
    folder, partner = find_pair(run)
    given = [baseline] if isinstance(baseline, str | Path) else list(baseline or ())
    main, *against = (load_run(f) for f in (folder, *(given or filter(None, [partner]))))
    base = against[0] if against else None
    if base is not None:
        name = f"{base.name} (baseline)" if base.name == main.name else base.name
        base = replace(base, name=name, repeats=(*base.repeats, tuple(against)))
    target = Path(run if out is None else out)
    if target.suffix not in (".html", ".htm"):
        target = target / "report.html"
    numbers = report_json(main, base, null_control)
    page = render(main, base, numbers)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        files.replace(target, page.encode())
        files.replace(target.with_suffix(".json"), (json.dumps(numbers, indent=2) + "\n").encode())
    except OSError as e:
        raise RollspecError(f"rollspec: {target} cannot be written ({e.strerror or e}); choose another --out.") from e
    return target, numbers


def report_json(run: Run, baseline: Run | None, null_control: str | None = None) -> Numbers:
    """The numbers of the page in strict JSON types."""
    runs, found = [r for r in (baseline, run) if r is not None], limits(run)
    numbers: Numbers = plain(
        {
            "run": summarize(run),
            "baseline": None if baseline is None else summarize(baseline),
            "comparison": None if baseline is None else compare(run, baseline),
            "limits": found,
            "limits_sentence": found and LIMITS.format(**found),
            "regret_sentence": found and _regret(found),
            "null_control": null_control,
            "calibration": calibration(run),
            "notes": [f"{r.name}: {note}" for r in runs for note in r.notes],
            "differing": {} if baseline is None else _differing(run, baseline),
            "provenance": {r.name: r.provenance for r in runs},
        }
    )
    return {"headline": headline(numbers), **numbers}


def _regret(found: Numbers) -> str:
    """How far from the best arm in hindsight, by the cost model and by the clock, and whether the two part."""

    def more(share: float) -> str:
        return f"{100 * abs(share):.1f} % {'more' if share >= 0 else 'less'}"

    said = (
        f"Against the oracle, the best arm of each batch size known in hindsight, it took {more(found['regret'])} time"
    )
    if found["regret_measured"] is not None:
        said += f"; with each arm's modelled time corrected by its timed steps, {more(found['regret_measured'])}"
    return f"{said}.{PARTS if found['regrets_part'] else ''}"


def render(run: Run, baseline: Run | None = None, numbers: Numbers | None = None) -> str:
    """The page as HTML. `numbers`: of `report_json`, where they are known already."""
    numbers = numbers or report_json(run, baseline)
    loader = jinja2.FileSystemLoader(Path(__file__).with_name("templates"))
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html.j2").render(
        numbers,
        main=run,
        number=number,
        runs=[s for s in (numbers["baseline"], numbers["run"]) if s],
        table=table(numbers),
        figures=figures(run, baseline),
        folders={r.name: r.folder for r in (baseline, run) if r is not None},
        written=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )


def headline(numbers: Numbers) -> str:
    """What the measurement says, in one sentence that claims no more than it."""
    run, c = numbers["run"], numbers["comparison"]
    lossy = [s["name"] for s in (numbers["baseline"], run) if s and s["lossy"]]
    suffix = f"; the rollouts of {' and '.join(lossy)} are LOSSY (reuse.mode = lenient)" if lossy else ""
    if c is None:
        gen, accepted = run["gen_median"], run["accept_length"]
        speed = "" if gen is None else f", generation {number(gen)} s per step (median)"
        length = "" if accepted is None else f", acceptance length {accepted:.2f}"
        return f"{run['steps']} training steps{speed}{length}; no baseline to compare with{suffix}"
    if c["overall"] is None:
        return f"no training step has a generation time in both runs, so no speed-up can be stated{suffix}"
    if c["later"] is not None and c["later"]["steps"] >= 2:
        speed = f"{_times(c['later'])} from the second epoch on"
    else:
        speed = _times(c["overall"])
    rest, relative = c["other_phases"], c["relative"]
    if rest and relative and not rest["low"] <= 1.0 <= rest["high"]:
        speed += (
            f", {relative['value']:.2f}x ({relative['low']:.2f}–{relative['high']:.2f}) relative to the job's other "
            f"phases, which were {rest['value']:.2f}x as fast"
        )
    return f"generation {speed}; {_sameness(c)}{suffix}"


def table(numbers: Numbers) -> list[tuple[str, list[str], str]]:
    """Rows of (what, one cell per run, change); baseline first."""
    runs = [s for s in (numbers["baseline"], numbers["run"]) if s]
    changes = _changes(numbers) if numbers["comparison"] else {}
    return [(label, [_cell(s[name], form) for s in runs], changes.get(name, "")) for label, name, form in ROWS]


def _changes(numbers: Numbers) -> dict[str, str]:
    c, a, b = numbers["comparison"], numbers["baseline"]["gen_median"], numbers["run"]["gen_median"]
    median = {"value": a / b} if a and b else None
    ratios = {"gen_total": c["overall"], "gen_median": median, "step_median": c["step"]}
    changes = {name: f"{r['value']:.2f}×" for name, r in ratios.items() if r}
    if speed := c["tokens_per_second"]:
        changes["tokens_per_second"] = f"{speed:.2f}×"
    if later := c["later_tokens_per_second"]:
        changes["tokens_per_second"] += f" ({later['value']:.2f}× from the second epoch on)"
    for name, difference, form in (("reward_last", c["reward"], ".3f"), ("length_mean", c["length"], ".1f")):
        if difference:
            mean, noise = round(difference["mean"], int(form[1])), difference["noise"]
            changes[name] = f"{mean:+{form}} on average".replace("-", "−") if mean else f"{0:{form}} on average"
            if noise is not None:
                within = "within" if difference["unchanged"] else "beyond"
                changes[name] += f", {within} the ±{noise:{form}} of two runs without rollspec"
    return changes


def _differing(run: Run, baseline: Run) -> dict[str, list[str]]:
    """What of the two runs' provenance is not the same, by part."""
    out = {}
    for part in ("settings", "machine", "versions"):
        a, b = (r.provenance.get(part) for r in (baseline, run))
        if isinstance(a, dict) and isinstance(b, dict) and a != b:
            out[part] = sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k))
    return out


def _times(r: Numbers) -> str:
    if r["low"] > 1.0:
        return f"{r['value']:.2f}x faster"
    if r["high"] < 1.0:
        return f"{1 / r['value']:.2f}x slower"
    return f"no faster or slower than noise ({r['value']:.2f}x, 95 % interval {r['low']:.2f}–{r['high']:.2f})"


def _sameness(c: Numbers) -> str:
    known = {name: d for name, d in (("reward", c["reward"]), ("lengths", c["length"])) if d is not None}
    if not known:
        return "reward and lengths were not measured in both runs"
    same = [name for name, d in known.items() if d["unchanged"]]
    parts = []
    if same:
        pairs = known[same[0]]["pairs"]
        parts.append(f"{' and '.join(same)} within what runs without rollspec differ by ({pairs} pairs)")
    for name, d in known.items():
        if not d["unchanged"]:
            parts.append(f"{name} {'higher' if d['mean'] > 0 else 'lower'} by {number(abs(d['mean']))}")
    if any(d["unchanged"] is None for d in known.values()):
        parts.append("with no second run without rollspec to compare that with")
    return ", ".join(parts)


def _cell(value: Any, form: str) -> str:
    if value is None:
        return "–"
    if form in ("%", "n"):
        return number(value, percent=True) if form == "%" else f"{value:,.0f}"
    return f"{value:{form}}" if form.startswith(".") else number(value) + (" s" if form else "")


def command(
    run: Annotated[Path, typer.Argument(help="Run folder (metrics.jsonl, or of TRL trainer_state.json), or a demo's.")],
    baseline: Annotated[
        list[Path] | None,
        typer.Option(
            help="Run folder of the same job without rollspec; further ones tell how far its runs differ by chance."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="HTML file or folder to write; default: inside RUN.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = False,
) -> None:
    """Write one self-contained HTML page (and JSON) about a run, alone or against a baseline."""
    page, numbers = write_report(run, baseline, out)
    written = page.with_suffix(".json")
    if as_json:
        sys.stdout.write(written.read_text(encoding="utf-8"))
    else:
        said = (numbers["headline"], numbers["limits_sentence"], numbers["regret_sentence"])
        typer.echo("\n".join([*filter(None, said), f"report: {page}", f"numbers: {written}"]))
    if open_page:
        webbrowser.open(page.resolve().as_uri())
