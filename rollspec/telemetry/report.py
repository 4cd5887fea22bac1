"""One self-contained HTML page about a run, alone or against a baseline, and the same numbers as JSON.

    paths = write_report("runs/latest/rollspec", baseline="runs/latest/baseline")
    print(paths.headline)     # generation 1.62x faster from the second epoch on; reward and lengths unchanged

The page has no external assets and no script; it follows the reader's light or dark setting. A metric that a run does
not carry leaves a sentence in its place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from importlib import resources
from pathlib import Path
from typing import Any

from rollspec.errors import RollspecError
from rollspec.telemetry.figures import figures
from rollspec.telemetry.limits import calibration, limits
from rollspec.telemetry.on_policy import on_policy
from rollspec.telemetry.plots import number
from rollspec.telemetry.runs import Run, find_pair, load_run
from rollspec.telemetry.sinks import plain
from rollspec.telemetry.summary import (
    FAULTS,
    GAP,
    SPECULATING,
    Comparison,
    Difference,
    Ratio,
    RunSummary,
    compare,
    summarize,
)

DASH = "–"


@dataclass(frozen=True)
class ReportPaths:
    """What `write_report` wrote, its first sentence, and how far from optimal the run was if it says."""

    html: Path
    json: Path
    headline: str
    limits: str | None


def write_report(
    run: str | Path, baseline: str | Path | Sequence[str | Path] | None = None, out: str | Path | None = None
) -> ReportPaths:
    """Write the page and its JSON.

    Args:
        run: run folder, or a folder with `baseline/` and `rollspec/` inside (as the demo leaves them).
        baseline: run folder to compare with; of the same job, so that steps correspond. Of several the first is
            compared with, and all of them tell how far runs of this job differ by chance.
        out: the HTML file, or a folder for `report.html`; beside the runs when None. JSON goes next to it.

    Raises:
        RollspecError: a folder or file is missing, empty or corrupted, or the output cannot be written.
    """
    folder, partner = find_pair(run)
    given = [baseline] if isinstance(baseline, str | Path) else list(baseline or ())
    against = [load_run(b) for b in (given or ([partner] if partner is not None else []))]
    main = load_run(folder)
    base = against[0] if against else None
    if base is not None and base.name == main.name:
        base = replace(base, name=f"{base.name} (baseline)")
    if base is not None and len(against) > 1:
        base = replace(base, repeats=(*base.repeats, tuple(against)))
    target = _target(Path(run), out)
    page, numbers = render(main, base), report_json(main, base)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page, encoding="utf-8")
        target.with_suffix(".json").write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    except OSError as e:
        raise RollspecError(f"rollspec: {target} cannot be written ({e.strerror or e}); choose another --out.") from e
    return ReportPaths(target, target.with_suffix(".json"), numbers["headline"], limits_sentence(main))


def report_json(run: Run, baseline: Run | None) -> dict[str, Any]:
    """The numbers of the page in strict JSON types."""
    found = limits(run)
    numbers: dict[str, Any] = plain(
        {
            "headline": headline(run, baseline),
            "run": summarize(run),
            "baseline": None if baseline is None else summarize(baseline),
            "comparison": None if baseline is None else compare(run, baseline),
            "limits": None if found is None else {**asdict(found), "regret": found.regret},
            "calibration": None if (drafts := calibration(run)) is None else asdict(drafts),
            "notes": _notes(run, baseline),
            "provenance": {r.name: r.provenance for r in (baseline, run) if r is not None},
        }
    )
    return numbers


def render(run: Run, baseline: Run | None = None) -> str:
    """The page as HTML."""
    try:
        import jinja2
        import matplotlib  # noqa: F401
    except ImportError as e:
        raise RollspecError(f"rollspec: the report needs {e.name}; run `pip install 'rollspec[report]'`.") from e
    templates = resources.files("rollspec.telemetry").joinpath("templates")
    source = templates.joinpath("report.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    mine, theirs = summarize(run), summarize(baseline) if baseline is not None else None
    comparison = compare(run, baseline) if baseline is not None else None
    bars = [_phase_bar(s) for s in (theirs, mine) if s is not None and s.phases]
    return environment.from_string(source).render(
        style=templates.joinpath("style.css").read_text(encoding="utf-8"),
        headline=headline(run, baseline),
        tiles=_tiles(mine, comparison),
        columns=[s.name for s in (theirs, mine) if s is not None],
        table=table(mine, theirs, comparison),
        epochs=_epochs(comparison),
        limits=[] if (found := limits(run)) is None else found.sentences(),
        figures=sorted(figures(run, baseline), key=lambda f: bool(f.missing)),  # gaps go last
        phases=bars,
        phase_names=list(dict.fromkeys(phase for _, parts in bars for phase, *_ in parts)),
        health=_health(run, mine, theirs),
        notes=_notes(run, baseline),
        provenance=[(r.name, _provenance(r)) for r in (baseline, run) if r is not None],
        written=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )


def headline(run: Run, baseline: Run | None) -> str:
    """What the measurement says, in one sentence that claims no more than it."""
    lossy = [r.name for r in (baseline, run) if r is not None and summarize(r).lossy]
    suffix = f"; the rollouts of {' and '.join(lossy)} are LOSSY (reuse.mode = lenient)" if lossy else ""
    return _headline(run, baseline) + suffix


def _headline(run: Run, baseline: Run | None) -> str:
    if baseline is None:
        s = summarize(run)
        parts = [f"{s.steps} training steps"]
        if s.gen_median is not None:
            parts.append(f"generation {number(s.gen_median)} s per step (median)")
        if s.accept_length is not None:
            parts.append(f"acceptance length {s.accept_length:.2f}")
        return ", ".join(parts) + "; no baseline to compare with"
    c = compare(run, baseline)
    if c.overall is None:
        return "the two runs have no training step with a generation time in common, so no speed-up can be stated"
    if c.later is not None and c.later.steps >= 2:
        speed = f"generation {_times(c.later)} from the second epoch on"
    else:
        speed = f"generation {_times(c.overall)}"
    return f"{speed}; {_sameness(c)}"


def limits_sentence(run: Run) -> str | None:
    """How far from optimal, in one sentence; None where the run does not carry it."""
    found = limits(run)
    return None if found is None else found.sentence()


def table(mine: RunSummary, theirs: RunSummary | None, c: Comparison | None) -> list[tuple[str, list[str], str]]:
    """Rows of (what, one cell per run, change); baseline first, as in `columns`."""
    runs = [s for s in (theirs, mine) if s is not None]

    def row(label: str, name: str, form: str = "", change: str = "") -> tuple[str, list[str], str]:
        return label, [_cell(getattr(s, name), form) for s in runs], change

    faster = {k: _brief(r) for k, r in (("gen", c.overall), ("step", c.step))} if c is not None else {}
    rate = f"{c.tokens_per_second:.2f}×" if c is not None and c.tokens_per_second else ""
    if c is not None and c.later_tokens_per_second is not None:
        rate += f" ({c.later_tokens_per_second.value:.2f}× from the second epoch on)"
    return [
        row("Generation, total", "gen_total", "s", faster.get("gen", "")),
        row("Generation per step, median", "gen_median", "s", _fold(theirs, mine, "gen_median")),
        row("Tokens per second", "tokens_per_second", "", rate),
        row("Response tokens", "tokens", "n"),
        row("Acceptance length", "accept_length", ".2"),
        row("Acceptance rate", "accept_rate", "%"),
        row("Cost of proposing", "propose_share", "%"),
        row("Training step, median", "step_median", "s", faster.get("step", "")),
        row("Generation's share of the step", "gen_share", "%"),
        row("Mean reward, start", "reward_first", ".3"),
        row("Mean reward, end", "reward_last", ".3", _difference(c.reward if c else None, ".3f")),
        row("Response length, mean", "length_mean", "", _difference(c.length if c else None, ".1f")),
        row("Response length, p50", "length_p50", "n"),
        row("Response length, p90", "length_p90", "n"),
        row("Response length, p99", "length_p99", "n"),
        row("Response length, max", "length_max", "n"),
        row("Responses cut at the limit", "clip_ratio", "%"),
    ]


def _tiles(mine: RunSummary, c: Comparison | None) -> list[tuple[str, str, str]]:
    """The few numbers a reader looks for first: (value, what, small print)."""
    tiles: list[tuple[str, str, str]] = []
    if c is not None:
        main, what = (c.later, "generation speed-up, epoch 2 on") if c.later else (c.overall, "generation speed-up")
        if main is not None:
            tiles.append((f"{main.value:.2f}×", what, f"95 %: {main.low:.2f}–{main.high:.2f}, {main.steps} steps"))
        if c.step is not None:
            tiles.append((f"{c.step.value:.2f}×", "whole training step", f"95 %: {c.step.low:.2f}–{c.step.high:.2f}"))
        if c.saved_seconds is not None:
            tiles.append((f"{number(c.saved_seconds)} s", "generation time saved", f"over {c.steps} steps"))
    elif mine.gen_median is not None:
        tiles.append((f"{number(mine.gen_median)} s", "generation per step", "median"))
        if mine.tokens_per_second is not None:
            tiles.append((number(mine.tokens_per_second), "tokens per second", "while generating"))
    if mine.accept_length is not None:
        tiles.append((f"{mine.accept_length:.2f}", "acceptance length", "tokens per verify step; 1 without drafts"))
    return tiles


def _epochs(c: Comparison | None) -> list[tuple[str, str, str]]:
    if c is None or len(c.by_epoch) < 2:
        return []
    return [(f"epoch {e + 1}", f"{r.value:.2f}×", f"{r.low:.2f}–{r.high:.2f}") for e, r in c.by_epoch.items()]


def _phase_bar(s: RunSummary) -> tuple[str, list[tuple[str, float, str]]]:
    """(run, [(phase, percent of the step, tooltip)]); what is under 1 % joins the rest."""
    total = sum(s.phases.values())
    shares = {k: v for k, v in s.phases.items() if v / total >= 0.01 and k != "other"}
    shares["other"] = total - sum(shares.values())
    return s.name, [(k, 100 * v / total, f"{k}: {v:.1f} s, {100 * v / total:.0f} %") for k, v in shares.items()]


def _health(run: Run, mine: RunSummary, theirs: RunSummary | None) -> list[tuple[str, str, str]]:
    """(ok | warn | none, what, sentence)."""
    out: list[tuple[str, str, str]] = []
    corr = mine.logprob_corr_min
    if corr is None:
        out.append(("none", "Engine and trainer agree", "No step carries a correlation of their probabilities."))
    else:
        # The same numbers without drafts are the yardstick: kernels differ between engine and trainer anyway.
        other = theirs.logprob_corr_min if theirs is not None else None
        floor = 0.99 if other is None else min(0.99, other - 0.005)
        against = "" if other is None else f", {other:.5f} without"
        sentence = f"Lowest correlation of their probabilities over the steps {corr:.5f}{against}."
        out.append(("ok" if corr >= floor else "warn", "Engine and trainer agree", sentence))
    if mine.logprob_gap is not None:
        unit = "|log p| gap" if run.has(GAP[0]) else "probability gap"
        without = f", {_gap(theirs)} without" if theirs is not None and theirs.logprob_gap is not None else ""
        out.append(("ok", f"Mean {unit}", f"{_gap(mine)}{without}."))
    out += on_policy(run, mine)
    if mine.speculating_share is None:
        out.append(("none", "Speculation", f"No step carries {SPECULATING}."))
    else:
        off = [s for s, v in zip(run.steps, run.series(SPECULATING), strict=True) if v is not None and v < 1]
        text = "On in every step." if not off else f"Off in step {_list(off)}."
        out.append(("ok" if not off else "warn", "Speculation", text))
    if (drafts := calibration(run)) is not None:
        out.append(("warn" if drafts.parts else "ok", "Predicted acceptance", drafts.sentence()))
    if mine.faults:
        causes = ", ".join(f"{cause} ×{n}" for cause, n in mine.faults.items())
        out.append(("warn", "Faults survived", f"{causes}; the log of the job has the first of each cause in full."))
    elif run.has(FAULTS):
        out.append(("ok", "Faults survived", "None."))
    else:
        out.append(("none", "Faults survived", f"No step carries {FAULTS}."))
    return out


def _provenance(run: Run) -> list[tuple[str, str]]:
    """Flat (key, text) pairs of run.json: what a reader needs to run it again."""
    rows: list[tuple[str, str]] = [("folder", str(run.folder))]

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), inner)
        elif isinstance(value, list):
            rows.append((prefix, " ".join(str(v) for v in value)))
        elif value is not None:
            rows.append((prefix, str(value)))

    walk("", run.provenance)
    return rows


def _notes(run: Run, baseline: Run | None) -> list[str]:
    notes = [f"{r.name}: {note}" for r in (baseline, run) if r is not None for note in r.notes]
    if baseline is None:
        return notes
    if run.steps != baseline.steps:
        shared = len(set(run.steps) & set(baseline.steps))
        notes.append(
            f"The runs have {len(baseline.steps)} and {len(run.steps)} steps; {shared} are in both and compared."
        )
    c = compare(run, baseline)
    if c.timed < c.steps:
        notes.append("Ratios of times leave the first step out, in which a process builds what later steps use.")
    if c.length is not None and c.length.noise is not None:
        notes.append(
            f"Reward and lengths of two runs without rollspec differ, too: 95 of 100 such pairs stay within the ± of "
            f"the table, which is from {c.length.pairs} pairs of this job."
        )
    elif c.length is not None:
        notes.append(
            "Two runs without rollspec differ in reward and lengths, too. To compare with that, give further runs of "
            "the job without rollspec: --baseline once for each, three at least."
        )
    mine, theirs = summarize(run), summarize(baseline)
    if mine.tokens and theirs.tokens and abs(mine.tokens / theirs.tokens - 1) > 0.03:
        notes.append(
            f"The runs generated {theirs.tokens:,.0f} and {mine.tokens:,.0f} tokens, so tokens per second compare them "
            "more fairly than seconds do."
        )
    for key in ("settings", "machine", "versions"):
        a, b = baseline.provenance.get(key), run.provenance.get(key)
        if isinstance(a, dict) and isinstance(b, dict) and a != b:
            changed = sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k))
            notes.append(f"The runs differ in {key}: {', '.join(changed)}; the comparison includes that difference.")
    return notes


def _times(r: Ratio) -> str:
    if r.low > 1.0:
        return f"{r.value:.2f}x faster"
    if r.high < 1.0:
        return f"{1 / r.value:.2f}x slower"
    return f"no faster or slower than noise ({r.value:.2f}x, 95 % interval {r.low:.2f}–{r.high:.2f})"


def _sameness(c: Comparison) -> str:
    known = [(name, d) for name, d in (("reward", c.reward), ("lengths", c.length)) if d is not None]
    if not known:
        return "reward and lengths were not measured in both runs"
    same = [name for name, d in known if d.unchanged]
    changed = [
        f"{name} {'higher' if d.mean > 0 else 'lower'} by {number(abs(d.mean))}" for name, d in known if not d.unchanged
    ]
    unknown = any(d.unchanged is None for _, d in known)
    return ", ".join(
        [
            *([f"{' and '.join(same)} unchanged"] if same else []),
            *changed,
            *(["with no second run without rollspec to compare that with"] if unknown else []),
        ]
    )


def _difference(d: Difference | None, form: str) -> str:
    if d is None:
        return ""
    text = f"{d.mean:{form}}"
    mean = text.lstrip("-") if float(text) == 0 else f"{d.mean:+{form}}".replace("-", "−")
    if d.noise is None:
        return f"{mean} on average"
    within = "within" if d.unchanged else "beyond"
    return f"{mean} on average, {within} the ±{d.noise:{form}} of two runs without rollspec"


def _brief(r: Ratio | None) -> str:
    return "" if r is None else f"{r.value:.2f}×"


def _fold(theirs: RunSummary | None, mine: RunSummary, name: str) -> str:
    a, b = getattr(theirs, name, None), getattr(mine, name)
    return f"{a / b:.2f}×" if a and b else ""


def _cell(value: float | None, form: str) -> str:
    if value is None or not math.isfinite(value):
        return DASH
    if form == "%":
        return f"{value * 100:.1f} %"
    if form == "n":
        return f"{value:,.0f}"
    if form.startswith("."):
        return f"{value:{form}f}"
    return f"{number(value)} s" if form == "s" else number(value)


def _gap(s: RunSummary) -> str:
    return DASH if s.logprob_gap is None else f"{s.logprob_gap:.2g}"


def _list(steps: list[int]) -> str:
    return ", ".join(map(str, steps[:8])) + (f" and {len(steps) - 8} more" if len(steps) > 8 else "")


def _target(run: Path, out: str | Path | None) -> Path:
    if out is None:
        return run / "report.html"
    path = Path(out)
    return path if path.suffix in (".html", ".htm") else path / "report.html"
