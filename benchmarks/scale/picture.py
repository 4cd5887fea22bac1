"""The result as one SVG: three panels over the number of replicas, both axes logarithmic. It takes a page's colours."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLE = "Simulated: seconds until a version is everywhere, age of what runs, and the share of responses recorded"
TEXT, GRID = "#57606a", "#e4e4e4"
VARIABLES = {
    TEXT: f"var(--md-default-fg-color--light,{TEXT})",
    GRID: f"var(--md-default-fg-color--lightest,{GRID})",
}
"""What a page sets -> its colour there."""

_RC = {
    "svg.fonttype": "none", "svg.hashsalt": "rollspec", "text.parse_math": False, "font.size": 9,
    "font.family": ["DejaVu Sans"], "figure.facecolor": "none", "axes.facecolor": "none", "axes.edgecolor": GRID,
    "axes.labelcolor": TEXT, "text.color": TEXT, "xtick.color": TEXT, "ytick.color": TEXT,
    "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.color": GRID,
    "axes.spines.left": False, "axes.spines.right": False, "axes.spines.top": False,
    "xtick.major.size": 0, "ytick.major.size": 0, "xtick.minor.size": 0, "ytick.minor.size": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Panel:
    """`lines`: name -> (colour, values), one per number of replicas."""

    title: str
    lines: dict[str, tuple[str, list[float]]]
    percent: bool = False


def panels(result: dict[str, Any]) -> list[Panel]:
    """What is drawn."""
    rows = result["replicas"]
    kinds = {"one sender": ("#d1495b", "star"), "shared store": ("#e3a008", "store"), "passed on": ("#5c6bc0", "tree")}

    def fleets(name: str) -> dict[str, tuple[str, list[float]]]:
        return {label: (c, [r["fan_out"][kind][name] for r in rows]) for label, (c, kind) in kinds.items()}

    rate = [r["feedback_budget"]["rate"] for r in rows]
    return [
        Panel("verdict to last replica, s", fleets("fan_out")),
        Panel("age of what runs, s", fleets("age")),
        Panel("responses recorded", {"by budget": ("#5c6bc0", rate)}, percent=True),
    ]


def draw(result: dict[str, Any], path: Path) -> Path:
    """Write the picture."""
    import matplotlib
    from matplotlib.figure import Figure

    x = [r["replicas"] for r in result["replicas"]]
    shown = panels(result)
    raw = io.StringIO()
    with matplotlib.rc_context(_RC):
        figure = Figure((11.75, 3.5), layout="constrained")
        for panel, ax in zip(shown, figure.subplots(1, len(shown)), strict=True):
            _panel(panel, x, ax)
        figure.savefig(raw, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    box, body = re.search(r'(viewBox="[^"]*")[^>]*>(.*)', raw.getvalue(), re.DOTALL).groups()  # type: ignore[union-attr]
    for colour, variable in VARIABLES.items():
        body = body.replace(colour, variable)
    body = re.sub(r'<g id="tip ([^"]*)"', r"<g><title>\1</title", re.sub(r"[ \t]+$", "", body, flags=re.MULTILINE))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" role="img" '
        f'aria-label="{escape(TITLE)}" {box}>{body}'
    )
    return path


def _panel(p: Panel, x: Sequence[int], ax: Axes) -> None:
    ax.set(xscale="log", yscale="log", xlabel="replicas")
    ax.set_title(p.title, fontsize=10, loc="left", fontweight="bold")
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.yaxis.set_major_formatter((lambda v, _: f"{100 * v:g} %") if p.percent else "{x:g}")
    values = [v for _, ys in p.lines.values() for v in ys if v > 0]
    ax.set_ylim(10 ** math.floor(math.log10(min(values))), 10 ** math.ceil(math.log10(max(values))))
    ax.minorticks_off()
    for name, (colour, ys) in p.lines.items():
        (line,) = ax.plot(x, ys, color=colour, lw=2, label=name)
        line.set_gid(f"line {name}")
        for n, y in zip(x, ys, strict=True):
            value = f"{100 * y:.3g} %" if p.percent else f"{y:.1f} s"
            (dot,) = ax.plot([n], [y], "o", color=colour, ms=4, mew=0)
            dot.set_gid(f"tip {name}, {n:,} replicas: {value}")
    ax.legend(frameon=False)
