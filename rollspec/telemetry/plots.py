"""Small charts as inline SVG, drawn by matplotlib: lines over steps, bars, a histogram.

The colours of a drawing become the variables of the report's style sheet, so one SVG serves light and dark; texts stay
texts, and whatever stands for a number says it under the mouse. No script, no external asset.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 460, 250  # of the page's pixels: texts stay legible when a phone shows them at three quarters
SOFT, GRID = "#5b6472", "#eceef2"
BINS = 32  # of a histogram
STYLES = {"s-run": "#0f766e", "s-base": "#8a93a3", "s-0": "#0f766e", "s-1": "#c2680b", "s-2": "#5b5bd6",
          "s-3": "#b8326e", "s-4": "#64748b"}  # fmt: skip
"""CSS class of a legend's entry -> colour of the drawing."""

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
class Line:
    """A series over x; None breaks the line. `style` is a CSS class."""

    label: str
    style: str
    x: Sequence[float]
    y: Sequence[float | None]


@dataclass(frozen=True)
class Bars:
    """One height per category of a bar chart."""

    label: str
    style: str
    y: Sequence[float | None]


def line_chart(
    lines: Sequence[Line],
    *,
    title: str,
    x_label: str,
    y_label: str,
    borders: Sequence[tuple[float, str]] = (),
    percent: bool = False,
    zero: bool = True,
) -> str:
    """Lines with a dot per value; `borders` are (x, label) of dashed vertical lines; `zero` starts the y axis at 0."""
    points = [(x, y) for line in lines for x, y in zip(line.x, line.y, strict=True) if y is not None]
    if not points:
        return ""
    out: list[str] = []
    tips: list[str] = []
    with _axes(out, tips, title, x_label, y_label, percent) as ax:
        from matplotlib.ticker import MaxNLocator

        ax.xaxis.set_major_locator(MaxNLocator(9, integer=True))
        for line in lines:
            size = 6.4 if len(line.x) <= 40 else 3.6
            heights = [math.nan if y is None else y for y in line.y]
            ax.plot(line.x, heights, color=STYLES[line.style], marker="o", ms=size, mew=0)
            known = [(x, y) for x, y in zip(line.x, line.y, strict=True) if y is not None]
            tips += [f"{line.label or title}, {x:g}: {number(y, percent)}" for x, y in known]
        if zero:
            ax.set_ylim(bottom=min(0.0, *(y for _, y in points)))
        for x, label in borders:
            if min(x for x, _ in points) < x < max(x for x, _ in points):
                ax.axvline(x, color=SOFT, lw=1, ls=(0, (3, 4)), alpha=0.7)
                at = ("data", "axes fraction")
                ax.annotate(label, (x, 1), (3, 2), xycoords=at, textcoords="offset points", fontsize=11)
    return out[0]


def bar_chart(
    groups: Sequence[str], bars: Sequence[Bars], *, title: str, x_label: str, y_label: str, percent: bool = False
) -> str:
    """Grouped bars from zero; a missing value leaves a gap."""
    if all(y is None for bar in bars for y in bar.y):
        return ""
    out: list[str] = []
    with _axes(out, [], title, x_label, y_label, percent) as ax:
        width = min(0.8 / len(bars), 26 * len(groups) / WIDTH)
        for j, bar in enumerate(bars):
            for i, y in enumerate(bar.y):
                if y is not None:
                    at = i + (j - (len(bars) - 1) / 2) * width
                    drawn = ax.bar(at, y, 0.94 * width, color=STYLES[bar.style])
                    drawn.patches[0].set_gid(f"tip {bar.label or title}, {x_label} {groups[i]}: {number(y, percent)}")
        every = math.ceil(len(groups) / 14)  # more labels than this overlap
        ax.set_xticks(range(0, len(groups), every), groups[::every])
        ax.set_xlim(-0.5, len(groups) - 0.5)
    return out[0]


def histogram(samples: Sequence[tuple[str, str, Sequence[int]]], *, title: str, x_label: str, y_label: str) -> str:
    """(label, style, values) overlaid as filled steps over common bins; counts on a log axis, so that tails show."""
    most = max((v for _, _, values in samples for v in values), default=None)
    if most is None:
        return ""
    width = math.ceil((most + 1) / BINS)  # whole tokens per bin: a fractional bin would comb
    edges = list(range(0, most + 1 + width, width))
    out: list[str] = []
    with _axes(out, [], title, x_label, y_label) as ax:
        ax.set_yscale("log")
        for label, style, values in samples:
            # From 0.4, so that a count of one is visible above the axis.
            counts = np.maximum(np.histogram(values, edges)[0], 0.4)
            drawn = ax.stairs(
                counts, edges, baseline=0.4, fill=True, fc=(STYLES[style], 0.22), ec=STYLES[style], lw=1.6
            )
            drawn.set_gid(f"tip {label}")
        ax.set_ylim(bottom=0.4)
        ax.yaxis.set_major_formatter("{x:,.0f}")
    return out[0]


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


@contextmanager
def _axes(
    out: list[str], tips: list[str], title: str, x_label: str, y_label: str, percent: bool = False
) -> Iterator[Axes]:
    """Empty axes to draw on; then their SVG is in `out`. `tips`: a text for each dot, in the order of drawing."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_RC):
        figure = Figure((WIDTH / 72, HEIGHT / 72), layout="constrained")
        ax = figure.add_subplot(xlabel=x_label, ylabel=y_label)
        ax.yaxis.set_major_formatter((lambda x, _: f"{100 * x:.4g} %") if percent else "{x:,.6g}")
        yield ax
        out.append(_svg(figure, title, tips))


def _svg(figure: Figure, title: str, tips: Sequence[str]) -> str:
    """The drawing as an element of a page: sized and coloured by the page, its texts and tips readable."""
    raw = io.StringIO()
    figure.savefig(raw, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    body = raw.getvalue().partition("<svg")[2].partition(">")[2]
    # Nothing is drawn outside the axes, so clipping does nothing but name its paths.
    body = re.sub(r"<style.*?</style>|<clipPath.*?</clipPath>| clip-path=\"[^\"]*\"", "", body, flags=re.DOTALL)
    left = iter(tips)
    body = re.sub(r"<use ([^>]*)/>", lambda m: f"<use {m[1]}><title>{escape(next(left))}</title></use>", body)
    body = re.sub(r'<g id="tip ([^"]*)"', r"<g><title>\1</title", body)
    body = re.sub(r'<g id="[^"]*"', "<g", body)
    for colour, variable in VARIABLES.items():
        body = body.replace(colour, variable)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{body}'
