"""Small charts as inline SVG: lines over steps, bars, a histogram. No library, no script, no external asset.

Colours are CSS classes (`s-run`, `s-base`, `s-0` ...) defined by the report's template, so one SVG serves light and
dark; the drawing is 460 units wide, so that its text stays legible when a phone shows it at three quarters of that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

WIDTH, HEIGHT = 460, 250
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 16, 38


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
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low, high = (min(0.0, *ys) if zero else min(ys)), max(ys)
    ticks = nice_ticks(low, high)
    sx = _Scale(min(xs), max(xs), LEFT + 6, WIDTH - RIGHT - 6)
    sy = _Scale(ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP)
    parts = [_y_axis(ticks, sy, percent), *_x_ticks(sorted(set(xs)), sx)]
    for x, label in borders:
        if sx.low < x < sx.high:
            parts.append(f'<line class="border" x1="{sx(x):.1f}" x2="{sx(x):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
            parts.append(f'<text class="border-label" x="{sx(x) + 4:.1f}" y="{TOP - 4}">{escape(label)}</text>')
    for line in lines:
        parts += _polyline(line, sx, sy, percent)
    return _svg(title, parts, x_label, y_label)


def bar_chart(
    groups: Sequence[str], bars: Sequence[Bars], *, title: str, x_label: str, y_label: str, percent: bool = False
) -> str:
    """Grouped bars from zero; a missing value leaves a gap."""
    values = [y for bar in bars for y in bar.y if y is not None]
    if not values:
        return ""
    ticks = nice_ticks(0.0, max(values))
    sy = _Scale(0.0, ticks[-1], HEIGHT - BOTTOM, TOP)
    slot = (WIDTH - LEFT - RIGHT) / len(groups)
    width = min(slot * 0.8 / len(bars), 26.0)
    parts = [_y_axis(ticks, sy, percent)]
    every = max(1, math.ceil(len(groups) / 14))  # more labels than this overlap
    for i, group in enumerate(groups):
        centre = LEFT + slot * (i + 0.5)
        if i % every == 0:
            parts.append(f'<text class="tick" x="{centre:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">'
                         f"{escape(group)}</text>")  # fmt: skip
        for j, bar in enumerate(bars):
            y = bar.y[i]
            if y is not None:
                left = centre + (j - len(bars) / 2) * width
                tip = f"{bar.label}, {x_label} {group}: {number(y, percent)}"
                height = max(0.0, sy(0) - sy(y))
                parts.append(
                    f'<rect class="{bar.style} fill" x="{left:.1f}" y="{sy(y):.1f}" width="{width - 1:.1f}" '
                    f'height="{height:.1f}" rx="2"><title>{escape(tip)}</title></rect>'
                )
    return _svg(title, parts, x_label, y_label)


def histogram(
    samples: Sequence[tuple[str, str, Sequence[int]]], *, title: str, x_label: str, y_label: str, bins: int = 32
) -> str:
    """(label, style, values) overlaid as filled steps over common bins; counts on a log axis, so that tails show."""
    everything = [v for _, _, values in samples for v in values]
    if not everything:
        return ""
    width = max(1, math.ceil((max(everything) + 1) / bins))  # whole tokens per bin: a fractional bin would comb
    edges = [width * i for i in range(math.ceil((max(everything) + 1) / width) + 1)]
    counted = [(label, style, np.histogram(values, bins=edges)[0]) for label, style, values in samples]
    top = max(int(counts.max()) for _, _, counts in counted)
    decades = list(range(0, max(1, math.ceil(math.log10(max(top, 2)))) + 1))
    # Half a decade below one leaves a count of one visible above the axis.
    sy = _Scale(-0.4, decades[-1], HEIGHT - BOTTOM, TOP)
    sx = _Scale(edges[0], edges[-1], LEFT, WIDTH - RIGHT)
    parts = []
    for d in decades:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{sy(d):.1f}" y2="{sy(d):.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{sy(d) + 4:.1f}" text-anchor="end">{10**d:,}</text>')
    for tick in nice_ticks(edges[0], edges[-1]):
        if edges[0] <= tick <= edges[-1]:
            parts.append(_x_tick(sx(tick), f"{tick:g}"))
    for label, style, counts in counted:
        outline, floor = [], HEIGHT - BOTTOM
        for left, right, n in zip(edges, edges[1:], counts, strict=False):
            y = floor if n == 0 else sy(math.log10(n))
            outline.append(f"{sx(left):.1f},{y:.1f} {sx(right):.1f},{y:.1f}")
        path = f"{sx(edges[0]):.1f},{floor} {' '.join(outline)} {sx(edges[-1]):.1f},{floor}"
        parts.append(f'<polygon class="{style} area" points="{path}"><title>{escape(label)}</title></polygon>')
    return _svg(title, parts, x_label, y_label)


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round values that cover [low, high]: multiples of 1, 2, 2.5 or 5 times a power of ten."""
    if high <= low:
        high = low + (abs(low) * 0.1 or 1.0)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


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


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return self.start + share * (self.end - self.start)


def _polyline(line: Line, sx: _Scale, sy: _Scale, percent: bool) -> list[str]:
    parts: list[str] = []
    stretch: list[tuple[float, float]] = []
    dots: list[str] = []
    for x, y in [*zip(line.x, line.y, strict=True), (math.nan, None)]:
        if y is None:
            if len(stretch) > 1:
                parts.append(
                    f'<polyline class="{line.style} line" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in stretch)}"/>'
                )
            stretch = []
            continue
        stretch.append((sx(x), sy(y)))
        tip = f"{line.label}, {x:g}: {number(y, percent)}"
        dots.append(f'<circle class="{line.style} dot" cx="{sx(x):.1f}" cy="{sy(y):.1f}" r="{_radius(len(line.x))}">'
                    f"<title>{escape(tip)}</title></circle>")  # fmt: skip
    return parts + dots


def _radius(count: int) -> float:
    return 3.2 if count <= 40 else 1.8


def _y_axis(ticks: Sequence[float], sy: _Scale, percent: bool) -> str:
    parts = []
    for tick in ticks:
        text = f"{tick * 100:g} %" if percent else f"{tick:,.6g}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{sy(tick):.1f}" y2="{sy(tick):.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{sy(tick) + 4:.1f}" text-anchor="end">{text}</text>')
    return "".join(parts)


def _x_ticks(xs: Sequence[float], sx: _Scale) -> list[str]:
    """At whole steps, at most nine of them."""
    every = max(1, math.ceil(len(xs) / 9))
    return [_x_tick(sx(x), f"{x:g}") for x in xs[::every]]


def _x_tick(x: float, text: str) -> str:
    return f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{text}</text>'


def _svg(title: str, parts: Sequence[str], x_label: str, y_label: str) -> str:
    middle = (LEFT + WIDTH - RIGHT) / 2
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f'<text class="axis" x="{middle:.0f}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x_label)}</text>'
        f'<text class="axis" x="12" y="{(TOP + HEIGHT - BOTTOM) / 2:.0f}" text-anchor="middle" '
        f'transform="rotate(-90 12 {(TOP + HEIGHT - BOTTOM) / 2:.0f})">{escape(y_label)}</text>'
        f'{"".join(parts)}<line class="base" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" '
        f'y2="{HEIGHT - BOTTOM}"/></svg>'
    )
