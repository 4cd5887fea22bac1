"""The result as one SVG: three panels over the number of replicas, both axes logarithmic. It takes a page's colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, TOP, BOTTOM, GAP = 270, 250, 48, 34, 40, 12
TITLE = "Simulated: seconds until a version is everywhere, age of what runs, and the share of responses recorded"
STYLE = """
.sc{font-family:system-ui,-apple-system,"Segoe UI",sans-serif;font-size:11px}
.sc text{fill:var(--md-default-fg-color,#24292f)}
.sc .s{fill:var(--md-default-fg-color--light,#57606a)}
.sc .t{font-weight:600;font-size:12px}
.sc .bg{fill:var(--md-default-bg-color,#ffffff)}
.sc .g{stroke:var(--md-default-fg-color--lightest,#e4e4e4)}
.sc .l{fill:none;stroke-width:2}
.sc .a{stroke:#d1495b;fill:#d1495b}.sc .b{stroke:#e3a008;fill:#e3a008}.sc .c{stroke:#5c6bc0;fill:#5c6bc0}
.sc .d{stroke:none}.sc .l.a,.sc .l.b,.sc .l.c{fill:none}
"""


@dataclass(frozen=True)
class Panel:
    """`lines`: name -> (CSS class, values), one per number of replicas."""

    title: str
    lines: dict[str, tuple[str, list[float]]]
    percent: bool = False


def panels(result: dict[str, Any]) -> list[Panel]:
    """What is drawn."""
    rows = result["replicas"]
    kinds = {"one sender": ("a", "star"), "shared store": ("b", "store"), "passed on": ("c", "tree")}

    def fleets(name: str) -> dict[str, tuple[str, list[float]]]:
        return {label: (c, [r["fan_out"][kind][name] for r in rows]) for label, (c, kind) in kinds.items()}

    rate = [r["feedback_budget"]["rate"] for r in rows]
    return [
        Panel("verdict to last replica, s", fleets("fan_out")),
        Panel("age of what runs, s", fleets("age")),
        Panel("responses recorded", {"by budget": ("c", rate)}, percent=True),
    ]


def draw(result: dict[str, Any], path: Path) -> Path:
    """Write the picture."""
    x = [r["replicas"] for r in result["replicas"]]
    shown = panels(result)
    width = len(shown) * (WIDTH + GAP)
    parts = [_panel(p, x, i * (WIDTH + GAP)) for i, p in enumerate(shown)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'<svg class="sc" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" role="img" '
        f'aria-label="{escape(TITLE)}">\n<title>{escape(TITLE)}</title>\n<style>{STYLE}</style>\n'
        f'<rect class="bg" width="{width}" height="{HEIGHT}"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )
    return path


def _panel(p: Panel, x: Sequence[int], at: float) -> str:
    values = [v for _, ys in p.lines.values() for v in ys if v > 0]
    low, high = 10 ** math.floor(math.log10(min(values))), 10 ** math.ceil(math.log10(max(values) * 1.0001))

    def px(n: float) -> float:
        span = math.log(x[-1] / x[0]) or 1.0
        return at + LEFT + (WIDTH - LEFT - 8) * math.log(n / x[0]) / span

    def py(v: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - math.log(max(v, low) / low) / math.log(high / low))

    out = [f'<text class="t" x="{at + LEFT:.0f}" y="14">{escape(p.title)}</text>']
    tick = float(low)
    while tick <= high * 1.001:
        text = f"{100 * tick:g} %" if p.percent else f"{tick:g}"
        out.append(
            f'<line class="g" x1="{at + LEFT:.0f}" x2="{at + WIDTH - 8:.0f}" y1="{py(tick):.1f}" y2="{py(tick):.1f}"/>'
            f'<text class="s" x="{at + LEFT - 5:.0f}" y="{py(tick) + 4:.1f}" text-anchor="end">{text}</text>'
        )
        tick *= 10
    for n in x[:: max(1, math.ceil(len(x) / 4))]:
        out.append(f'<text class="s" x="{px(n):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{n:,}</text>')
    middle = at + (LEFT + WIDTH - 8) / 2
    out.append(f'<text class="s" x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle">replicas</text>')
    # The names stand where no line begins.
    first = min(py(ys[0]) for _, ys in p.lines.values())
    names = TOP + 4 if first > (TOP + HEIGHT - BOTTOM) / 2 else HEIGHT - BOTTOM - 14 * len(p.lines)
    for i, (name, (style, ys)) in enumerate(p.lines.items()):
        points = " ".join(f"{px(n):.1f},{py(v):.1f}" for n, v in zip(x, ys, strict=True))
        out.append(f'<polyline class="l {style}" points="{points}"/>')
        for n, v in zip(x, ys, strict=True):
            said = f"{100 * v:.3g} %" if p.percent else f"{v:.1f} s"
            out.append(
                f'<circle class="d {style}" cx="{px(n):.1f}" cy="{py(v):.1f}" r="2.6">'
                f"<title>{escape(name)}, {n:,} replicas: {said}</title></circle>"
            )
        out.append(f'<circle class="d {style}" cx="{at + LEFT + 8:.0f}" cy="{names + 14 * i}" r="3"/>')
        out.append(f'<text class="s" x="{at + LEFT + 15:.0f}" y="{names + 4 + 14 * i}">{escape(name)}</text>')
    return "".join(out)
