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
    Series,
    measured,
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

VARIABLES = {"#0f766e": "run", "#8a93a3": "base", "#c2680b": "c1", "#5b5bd6": "c2", "#b8326e": "c3", "#64748b": "c4",
             SOFT: "soft", GRID: "grid"}  # fmt: skip
"""Colour of the drawing -> variable of the style sheet."""
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
    mine, lines = run.series, partial(_lines, run)
    single = [(r.name, style, r.all_lengths) for r, style in runs if r.all_lengths]
    quantiles = {n: mine(f"rollspec/length/{n}", f"response_length/{n}") for n in ("p50", "mean", "p90", "p99", "max")}
    rates = {f"{d} ({sum(run.known(DRAFTED + d)):,.0f} drafted)": rate for d, rate in _under(run, RATE).items()}
    over_steps = partial(line_chart, marks=_changes(run, [f"epoch {e + 1}" for e in run.epochs]))
    share = partial(over_steps, percent=True)

    def both(*names: str) -> list[Line]:
        return [Line(r.name, style, r.steps, r.series(*names)) for r, style in runs]

    return [
        over_steps("Generation time per step", "seconds", both(GEN)),
        over_steps("Mean reward", "reward", both(*REWARD), zero=False),
        over_steps("Acceptance length", "tokens per verify step", lines({"": mine(*ACCEPT_LENGTH)}),
                   note="Accepted draft tokens plus one; without drafts it is 1."),
        share("Acceptance by drafter", "accepted / drafted", lines(rates or {"": mine(*ACCEPT_RATE)})),
        line_chart("Acceptance by draft position", "accepted, given verified", _by_position(run),
                   x_label="position in the draft", percent=True),
        *(_draft_head(run) if run.has(VERSION) else []),
        histogram("Response lengths", "response length (tokens)", "responses (log)", single) if single else
        over_steps("Response lengths", "tokens", lines(quantiles),
                   note=f"Of {run.name}, per step: it did not record the single lengths that a histogram needs."),
        over_steps("Speed-up and its limits", "times no drafts", lines(_limits(run)),
                   note="By the fitted cost of engine steps. The clairvoyant knows what will be accepted."),
        share("Draft lengths chosen", "share of engine steps", lines(_arms(run))),
        share("Cost of proposing", "share of engine time", lines({"": mine("rollspec/rollout/propose_share")})),
        share("Effective sample size", "share of the sample",
              lines({"of tokens": mine(ESS_TOKEN), "of whole responses": mine(ESS_SEQUENCE)}),
              note="Engine against trainer; rounding alone lowers that of whole responses as they get longer."),
        share("Repeats of the last epoch", "share of tokens",
              lines({"repeated": mine(OVERLAP), "by chance": mine(CHANCE)}),
              note="Tokens in a prefix that equals the prompt's last response of the same number."),
        over_steps("Time of the whole training step", "seconds", both(STEP_TIME)),
    ]  # fmt: skip


def _draft_head(run: Run) -> list[Figure]:
    """The draft head over the steps, with its versions marked, and what its training made of idle time."""
    versions = [None if v is None else f"v{v:.0f}" for v in run.series(VERSION)]
    over_steps, terms = partial(line_chart, marks=_changes(run, versions)), _under(run, f"{DRAFTER}loss/")
    names = ("swaps", "swap_seconds", "idle_seconds", "used_seconds")
    swaps, seconds, idle, used = (sum(run.known(DRAFTER + name)) for name in names)
    late, cost = run.known(f"{DRAFTER}preempt_p99_seconds"), run.known(f"{DRAFTER}idle_cost")

    def mine(name: str) -> Series:
        return run.series(DRAFTER + name)

    return [
        over_steps("Draft head: acceptance length", "tokens per verify step",
                   _lines(run, {"": mine("accept_length")}), zero=False,
                   note="Of what was scored since its weights last changed, verified or not."
                   + (f" {swaps:.0f} swaps, {1e3 * seconds / swaps:.2f} ms each." if swaps else "")),
        over_steps("Draft head: staleness", "policy versions behind", _lines(run, {"": mine("staleness")})),
        over_steps("Draft head: training loss", "nats", _lines(run, {"loss": mine("loss"), **terms}),
                   note="The terms are without their weights." if terms else ""),
        over_steps("Idle time and what training made of it", "seconds",
                   _lines(run, {"idle": mine("idle_seconds"), "used": mine("used_seconds")}),
                   note=f"{used:.1f} of {idle:.1f} s, over all replicas."
                   + (f" Requests waited {1e3 * late[-1]:.1f} ms for it at the 99th percentile." if late else "")
                   + (f" It cost the engine {100 * cost[-1]:.1f} % of its time at the end." if cost else "")),
    ]  # fmt: skip


def _by_position(run: Run) -> list[Line]:
    """Of the i-th drafted token, given that all before it were accepted, in the first and the last epoch."""
    found = _under(run, POSITION)

    def line(epoch: int, style: str) -> Line:
        of = [[v for v, e in zip(rates, run.epochs, strict=True) if e == epoch] for rates in found.values()]
        return Line(f"epoch {epoch + 1}", style, [int(i) for i in found], [measured(fmean, v) for v in of])

    return [line(*of) for of in {min(run.epochs): "s-1", max(run.epochs): "s-run"}.items()]


def _limits(run: Run) -> dict[str, Series]:
    """Modelled speed-ups over no drafts."""
    settings = {"got": "played", "oracle arm": "oracle", "clairvoyant": "clairvoyant", "perfect drafter": "perfect"}
    none, *others = (run.series(MODELLED + setting) for setting in ("none", *settings.values()))
    speeds = [[n / t if n and t else None for n, t in zip(none, seconds, strict=True)] for seconds in others]
    return dict(zip(settings, speeds, strict=True))


def _arms(run: Run) -> dict[str, Series]:
    """Share of engine steps of the arms that were played most."""
    found = _under(run, ARM)
    # A step that carries any arm carries all that were played in it.
    recorded = [any(v is not None for v in step) for step in zip(*found.values(), strict=True)]
    most = sorted(found, key=lambda arm: -sum(v or 0.0 for v in found[arm]))[:COLOURS]
    return {arm: [(v or 0.0) if known else None for v, known in zip(shares, recorded, strict=True)]
            for arm, shares in found.items() if arm in most}  # fmt: skip


def _lines(run: Run, found: Mapping[str, Series]) -> list[Line]:
    return [Line(label, f"s-{i % COLOURS}", run.steps, values) for i, (label, values) in enumerate(found.items())]


def _under(run: Run, prefix: str) -> dict[str, Series]:
    return {name.removeprefix(prefix): run.series(name) for name in run.names(prefix)}


def _changes(run: Run, labels: Sequence[str | None]) -> list[tuple[float, str]]:
    """Half a step before the first step of each later epoch, or the first that ran another version of the drafter."""
    pairs = zip(run.steps[1:], labels, labels[1:], strict=False)
    return [(step - 0.5, after) for step, before, after in pairs if before and after and before != after]


# ---- drawing --------------------------------------------------------------------------------------------------------


def line_chart(
    title: str, unit: str, lines: Sequence[Line], *, x_label: str = "training step",
    marks: Sequence[tuple[float, str]] = (), percent: bool = False, zero: bool = True, note: str = "",
) -> Figure:  # fmt: skip
    """Lines with a dot per value; `marks` are (x, label) of dashed vertical lines; `zero` starts the y axis at 0."""
    known = [(line, [(x, y) for x, y in zip(line.x, line.y, strict=True) if y is not None]) for line in lines]
    if not any(points for _, points in known):
        return Figure(title)

    def draw(ax: Axes) -> None:
        ax.xaxis.set_major_locator(MaxNLocator(9, integer=True))
        for line in lines:
            size = 6.4 if len(line.x) <= 40 else 3.6
            ax.plot(line.x, np.array(line.y, float), color=STYLES[line.style], marker="o", ms=size, mew=0)
        (first, least), (last, _) = ax.dataLim.get_points()
        if zero:
            ax.set_ylim(bottom=min(0.0, least))
        for x, label in marks:
            if first < x < last:
                ax.axvline(x, color=SOFT, lw=1, ls=(0, (3, 4)), alpha=0.7)
                at = ("data", "axes fraction")
                ax.annotate(label, (x, 1), (3, 2), xycoords=at, textcoords="offset points", fontsize=11)

    legend = tuple((line.label, line.style) for line, points in known if line.label and points)
    tips = [f"{line.label or title}, {x:g}: {number(y, percent)}" for line, points in known for x, y in points]
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
    beside = r'<style.*?</style>|<clipPath.*?</clipPath>| clip-path="[^"]*"|(?<=<g) id="[^"]*"'
    body = re.sub(beside, "", body, flags=re.DOTALL)
    left = iter(tips)
    body = re.sub(r"<use ([^>]*)/>", lambda m: f"<use {m[1]}><title>{escape(next(left))}</title></use>", body)
    for colour, variable in VARIABLES.items():
        body = body.replace(colour, f"var(--{variable})")
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{body}'
