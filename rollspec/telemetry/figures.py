"""The figures of a report: what each shows, drawn by matplotlib as inline SVG.

The colours of a drawing become the variables of the report's style sheet, so one SVG serves light and dark; texts stay
texts, and a dot says its value under the mouse. No script, no external asset.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from statistics import fmean
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator

from rollspec.telemetry.runs import GEN, STEP_TIME, Run
from rollspec.telemetry.summary import (
    ACCEPT_LENGTH,
    ACCEPT_RATE,
    CHANCE,
    ESS_SEQUENCE,
    ESS_TOKEN,
    MODELLED,
    OVERLAP,
    REWARD,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RATE, DRAFTED, POSITION = "rollspec/accept/rate/", "rollspec/accept/drafted/", "rollspec/accept/position/"
ARM, DRAFTER = "rollspec/tuner/arm/", "rollspec/drafter/"
VERSION = DRAFTER + "version"

WIDTH, HEIGHT = 460, 250  # of the page's pixels: texts stay legible when a phone shows them at three quarters
SOFT, GRID = "#5b6472", "#eceef2"
BINS = 32  # of a histogram
STYLES = {"s-run": "#0f766e", "s-base": "#8a93a3", "s-0": "#0f766e", "s-1": "#c2680b", "s-2": "#5b5bd6",
          "s-3": "#b8326e", "s-4": "#64748b"}  # fmt: skip
"""CSS class of a legend's entry -> colour of the drawing."""
COLOURS = 5  # s-0 ... s-4

VARIABLES = {**{colour: f"var(--{style.replace('s-', 'c')})" for style, colour in STYLES.items()},
             "#0f766e": "var(--run)", "#8a93a3": "var(--base)", SOFT: "var(--soft)", GRID: "var(--grid)"}  # fmt: skip
_RC = {
    "svg.fonttype": "none", "svg.hashsalt": "rollspec", "text.parse_math": False,
    "font.family": ["DejaVu Sans"], "font.size": 12, "axes.labelsize": 12, "xtick.labelsize": 12, "ytick.labelsize": 12,
    "figure.facecolor": "none", "axes.facecolor": "none", "axes.edgecolor": SOFT, "axes.labelcolor": SOFT,
    "text.color": SOFT, "xtick.color": SOFT, "ytick.color": SOFT, "xtick.major.size": 0, "ytick.major.size": 0,
    "ytick.minor.size": 0, "axes.spines.left": False, "axes.spines.right": False, "axes.spines.top": False,
    "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.color": GRID, "lines.linewidth": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """A chart with its legend (label, CSS class); without a drawing where nothing was measured."""

    title: str
    svg: str = ""
    legend: tuple[tuple[str, str], ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Line:
    """A series over x; None breaks the line. `style` is a CSS class; without a label it is not in the legend."""

    label: str
    style: str
    x: Sequence[float]
    y: Sequence[float | None]


def figures(run: Run, baseline: Run | None) -> list[Figure]:
    """All figures, in the order of the report."""
    runs = [*([(baseline, "s-base")] if baseline is not None else []), (run, "s-run")]

    def both(*names: str) -> list[Line]:
        return [Line(r.name, style, r.steps, r.series(*names)) for r, style in runs]

    def one(*names: str) -> list[Line]:
        return _lines(run, {"": run.series(*names)})

    def parts(**names: str) -> list[Line]:
        return _lines(run, {label.replace("_", " "): run.series(name) for label, name in names.items()})

    over_steps = partial(line_chart, marks=_changes(run, [f"epoch {e + 1}" for e in run.epochs]))
    share = partial(over_steps, percent=True)
    return [
        over_steps("Generation time per step", "seconds", both(GEN)),
        over_steps("Mean reward", "reward", both(*REWARD), zero=False),
        over_steps("Acceptance length", "tokens per verify step", one(*ACCEPT_LENGTH),
                   note="Accepted draft tokens plus one; without drafts it is 1."),
        share("Acceptance by drafter", "accepted / drafted", _by_drafter(run) or one(*ACCEPT_RATE)),
        line_chart("Acceptance by draft position", "accepted, given verified", _by_position(run),
                   x_label="position in the draft", percent=True),
        *(_learned(run) if run.has(VERSION) else []),
        _response_lengths(runs) or over_steps(
            "Response lengths", "tokens", _percentiles(run),
            note=f"Of {run.name}, per step: it did not record the single lengths that a histogram needs."),
        over_steps("Speed-up and its limits", "times no drafts", _limits(run),
                   note="By the fitted cost of engine steps. The clairvoyant knows what will be accepted."),
        share("Draft lengths chosen", "share of engine steps", _arms(run)),
        share("Cost of proposing", "share of engine time", one("rollspec/rollout/propose_share")),
        share("Effective sample size", "share of the sample",
              parts(of_tokens=ESS_TOKEN, of_whole_responses=ESS_SEQUENCE),
              note="Engine against trainer; rounding alone lowers that of whole responses as they get longer."),
        share("Repeats of the last epoch", "share of tokens", parts(repeated=OVERLAP, by_chance=CHANCE),
              note="Tokens in a prefix that equals the prompt's last response of the same number."),
        over_steps("Time of the whole training step", "seconds", both(STEP_TIME)),
    ]  # fmt: skip


def _by_drafter(run: Run) -> list[Line]:
    drafted = {d: sum(run.known(DRAFTED + d)) for d in _under(run, RATE)}
    return _lines(run, {f"{d} ({n:,.0f} drafted)": run.series(RATE + d) for d, n in drafted.items()})


def _by_position(run: Run) -> list[Line]:
    """Of the i-th drafted token, given that all before it were accepted, in the first and the last epoch."""
    positions, lines = _under(run, POSITION), []
    for epoch, style in {min(run.epochs): "s-1", max(run.epochs): "s-run"}.items():
        rows = [row for row, e in zip(run.rows, run.epochs, strict=True) if e == epoch]
        values = [[row[POSITION + i] for row in rows if POSITION + i in row] for i in positions]
        y = [fmean(v) if v else None for v in values]
        lines.append(Line(f"epoch {epoch + 1}", style, [int(i) for i in positions], y))
    return lines


def _learned(run: Run) -> list[Figure]:
    """The learned drafter over the steps, with its versions marked, and what its training made of idle time."""
    versions = [None if v is None else f"v{v:.0f}" for v in run.series(VERSION)]
    over_steps = partial(line_chart, marks=_changes(run, versions))
    names = ("accept_length", "staleness", "loss", "idle_seconds", "used_seconds")
    length, staleness, loss, idle, used = (run.series(DRAFTER + name) for name in names)
    terms = {name: run.series(f"{DRAFTER}loss/{name}") for name in _under(run, f"{DRAFTER}loss/")}
    swaps, seconds, spent, had = (sum(run.known(DRAFTER + n)) for n in ("swaps", "swap_seconds", *names[4:2:-1]))
    late = run.known(f"{DRAFTER}preempt_p99_seconds")
    return [
        over_steps("Learned drafter: acceptance length", "tokens per verify step", _lines(run, {"": length}),
                   zero=False, note="Of what was scored since its weights last changed, verified or not."
                   + (f" {swaps:.0f} swaps, {1e3 * seconds / swaps:.2f} ms each." if swaps else "")),
        over_steps("Learned drafter: staleness", "policy versions behind", _lines(run, {"": staleness})),
        over_steps("Learned drafter: training loss", "nats", _lines(run, {"loss": loss, **terms}),
                   note="The terms are without their weights." if terms else ""),
        over_steps("Idle time and what training made of it", "seconds", _lines(run, {"idle": idle, "used": used}),
                   note=f"{spent:.1f} of {had:.1f} s, over all replicas."
                   + (f" Requests waited {1e3 * late[-1]:.1f} ms for it at the 99th percentile." if late else "")),
    ]  # fmt: skip


def _response_lengths(runs: Sequence[tuple[Run, str]]) -> Figure | None:
    samples = [(r.name, style, r.all_lengths) for r, style in runs if r.all_lengths]
    return histogram("Response lengths", "response length (tokens)", "responses (log)", samples) if samples else None


def _percentiles(run: Run) -> list[Line]:
    names = ("p50", "mean", "p90", "p99", "max")
    return _lines(run, {n: run.series(f"rollspec/length/{n}", f"response_length/{n}") for n in names})


def _limits(run: Run) -> list[Line]:
    """Modelled speed-ups over no drafts."""
    base, found = run.series(f"{MODELLED}none"), {}
    settings = {"got": "played", "oracle arm": "oracle", "clairvoyant": "clairvoyant", "perfect drafter": "perfect"}
    for label, setting in settings.items():
        seconds = run.series(MODELLED + setting)
        found[label] = [b / t if b and t else None for b, t in zip(base, seconds, strict=True)]
    return _lines(run, found)


def _arms(run: Run) -> list[Line]:
    """Share of engine steps of the arms that were played most."""
    # A step that carries any arm carries all that were played in it.
    recorded = [any(name.startswith(ARM) for name in row) for row in run.rows]
    most = sorted(_under(run, ARM), key=lambda arm: -sum(run.known(ARM + arm)))[:COLOURS]
    rows = {arm: zip(run.series(ARM + arm), recorded, strict=True) for arm in _under(run, ARM) if arm in most}
    return _lines(run, {arm: [(v or 0.0) if known else None for v, known in row] for arm, row in rows.items()})


# ---- drawing --------------------------------------------------------------------------------------------------------


def line_chart(
    title: str, unit: str, lines: Sequence[Line], *, x_label: str = "training step",
    marks: Sequence[tuple[float, str]] = (), percent: bool = False, zero: bool = True, note: str = "",
) -> Figure:  # fmt: skip
    """Lines with a dot per value; `marks` are (x, label) of dashed vertical lines; `zero` starts the y axis at 0."""
    known = [(line, [(x, y) for x, y in zip(line.x, line.y, strict=True) if y is not None]) for line in lines]
    points = [point for _, values in known for point in values]
    if not points:
        return Figure(title)

    def draw(ax: Axes) -> None:
        ax.xaxis.set_major_locator(MaxNLocator(9, integer=True))
        for line in lines:
            heights = [math.nan if y is None else y for y in line.y]
            size = 6.4 if len(line.x) <= 40 else 3.6
            ax.plot(line.x, heights, color=STYLES[line.style], marker="o", ms=size, mew=0)
        if zero:
            ax.set_ylim(bottom=min(0.0, *(y for _, y in points)))
        for x, label in marks:
            if min(x for x, _ in points) < x < max(x for x, _ in points):
                ax.axvline(x, color=SOFT, lw=1, ls=(0, (3, 4)), alpha=0.7)
                at = ("data", "axes fraction")
                ax.annotate(label, (x, 1), (3, 2), xycoords=at, textcoords="offset points", fontsize=11)

    legend = tuple((line.label, line.style) for line, values in known if line.label and values)
    tips = [f"{line.label or title}, {x:g}: {number(y, percent)}" for line, values in known for x, y in values]
    return Figure(title, _svg(title, x_label, unit, draw, tips, percent), legend, note)


def histogram(title: str, x_label: str, unit: str, samples: Sequence[tuple[str, str, Sequence[int]]]) -> Figure:
    """(label, style, values) overlaid as filled steps over common bins; counts on a log axis, so that tails show."""
    most = max(v for _, _, values in samples for v in values)
    width = math.ceil((most + 1) / BINS)  # whole tokens per bin: a fractional bin would comb
    edges = list(range(0, most + 1 + width, width))

    def draw(ax: Axes) -> None:
        ax.set_yscale("log")
        for _, style, values in samples:
            # From 0.4, so that a count of one is visible above the axis.
            counts, colour = np.maximum(np.histogram(values, edges)[0], 0.4), STYLES[style]
            ax.stairs(counts, edges, baseline=0.4, fill=True, fc=(colour, 0.22), ec=colour, lw=1.6)
        ax.set_ylim(bottom=0.4)
        ax.yaxis.set_major_formatter("{x:,.0f}")

    return Figure(title, _svg(title, x_label, unit, draw), tuple((label, style) for label, style, _ in samples))


def number(value: float, percent: bool = False) -> str:
    """About three significant digits, trailing zeros kept so that columns line up; thousands separated."""
    if percent:
        return f"{value * 100:.1f} %"
    size = abs(value)
    if size == 0 or size >= 100:
        return f"{value:,.0f}"
    if size < 0.001:
        return f"{value:.1e}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 1 else f"{value:.3f}"


def _svg(
    title: str, x_label: str, unit: str, draw: Callable[[Axes], None], tips: Sequence[str] = (), percent: bool = False
) -> str:
    """What `draw` draws as an element of a page. `tips`: a text for each dot, in the order of drawing."""
    with mpl.rc_context(_RC):
        canvas = Canvas((WIDTH / 72, HEIGHT / 72), layout="constrained")
        ax = canvas.add_subplot(xlabel=x_label, ylabel=unit)
        ax.yaxis.set_major_formatter((lambda x, _: f"{100 * x:.4g} %") if percent else "{x:,.6g}")
        draw(ax)
        raw = io.StringIO()
        canvas.savefig(raw, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    body = raw.getvalue().partition("<svg")[2].partition(">")[2]
    # Nothing is drawn outside the axes, so clipping does nothing but name its paths.
    body = re.sub(r"<style.*?</style>|<clipPath.*?</clipPath>| clip-path=\"[^\"]*\"", "", body, flags=re.DOTALL)
    left = iter(tips)
    body = re.sub(r"<use ([^>]*)/>", lambda m: f"<use {m[1]}><title>{escape(next(left))}</title></use>", body)
    body = re.sub(r'<g id="[^"]*"', "<g", body)
    for colour, variable in VARIABLES.items():
        body = body.replace(colour, variable)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{body}'


def _lines(run: Run, found: Mapping[str, Sequence[float | None]]) -> list[Line]:
    return [Line(label, f"s-{i % COLOURS}", run.steps, values) for i, (label, values) in enumerate(found.items())]


def _under(run: Run, prefix: str) -> list[str]:
    return [name.removeprefix(prefix) for name in run.names(prefix)]


def _changes(run: Run, labels: Sequence[str | None]) -> list[tuple[float, str]]:
    """Half a step before the first step of each later epoch, or the first that ran another version of the drafter."""
    pairs = zip(run.steps[1:], labels, labels[1:], strict=False)
    return [(step - 0.5, after) for step, before, after in pairs if before and after and before != after]
