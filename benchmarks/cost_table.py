"""What the cost sweep says: cells, the fit's error, slopes, the knee, what speculation must reach to pay; as data,
tables and a picture.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from rollspec.tuning.cost import CostModel


@dataclass(frozen=True)
class Cell:
    """Steps of one kind. `all_accepted`: drafts accepted, rejected, or None without drafts. `prompt`: its tokens.
    `context_tokens`: of the batch, mean. `seconds`: median. `accepted`: share that really was.
    """

    requests: int
    k: int
    all_accepted: bool | None
    prompt: int
    context_tokens: float
    seconds: float
    accepted: float | None

    @property
    def tokens(self) -> int:
        """Tokens that go through the target in a step."""
        return self.requests * (1 + self.k)

    @property
    def spot(self) -> tuple[int, int, bool | None, int]:
        """Which cell of the sweep it is."""
        return self.requests, self.k, self.all_accepted, self.prompt


def merge(rounds: Sequence[Sequence[Cell]]) -> list[Cell]:
    """One cell per spot: the median over rounds."""
    found: dict[Any, list[Cell]] = defaultdict(list)
    for cells in rounds:
        for c in cells:
            found[c.spot].append(c)
    merged = []
    for same in found.values():
        accepted = [c.accepted for c in same if c.accepted is not None]
        merged.append(
            Cell(
                *same[0].spot,
                statistics.median(c.context_tokens for c in same),
                statistics.median(c.seconds for c in same),
                statistics.mean(accepted) if accepted else None,
            )
        )
    return sorted(merged, key=lambda c: (c.prompt, c.requests, c.k, not c.all_accepted))


def errors(model: CostModel, cells: Sequence[Cell]) -> dict[str, Any]:
    """|fit - measured| / measured over cells."""
    off = [(abs(model.seconds(c.tokens, c.context_tokens, c.requests) / c.seconds - 1.0), c) for c in cells]
    values = [e for e, _ in off]
    worst = max(off, key=lambda e: e[0])
    return {
        "median": statistics.median(values),
        "p90": float(np.quantile(values, 0.9)),
        "max": worst[0],
        "worst": f"{worst[1].requests} requests, K={worst[1].k}, prompt {worst[1].prompt}",
        "cells": len(values),
    }


def octaves(model: CostModel, most: int) -> list[dict[str, float]]:
    """Cost of one more token in each octave of tokens per step, at no context."""
    out, low = [], 1
    while low < most:
        high = min(2 * low, most)
        slope = (model.seconds(high) - model.seconds(low)) / (high - low)
        out.append({"from": low, "to": high, "seconds": model.seconds(high), "us_per_token": 1e6 * slope})
        low *= 2
    return out


def doubles(model: CostModel, most: int) -> int | None:
    """Tokens at which a step takes twice as long as with one; None if that is beyond `most`."""
    times = model.curve(1, most - 1)
    twice = np.flatnonzero(times >= 2.0 * times[0])
    return int(twice[0]) + 1 if twice.size else None


def knee(cells: Sequence[Cell], c_context: float) -> dict[str, Any]:
    """Where verified tokens stop being nearly free: the roofline floor + slope·max(0, tokens - knee) that has the least
    squared relative error over the cells, their context taken off at `c_context` seconds per token.

    `flat`: whether it fits clearly better (by a tenth) than a line without a floor does; if not, there is no knee.
    """
    from scipy.optimize import nnls

    n = np.array([c.tokens for c in cells], float)
    bare = np.array([max(c.seconds - c_context * c.context_tokens, 0.1 * c.seconds) for c in cells])

    def roofline(at: float) -> tuple[float, float, float, float]:
        found, off = nnls(np.stack([1.0 / bare, np.maximum(0.0, n - at) / bare], axis=1), np.ones_like(bare))
        return float(off), at, float(found[0]), float(found[1])

    off, at, floor, slope = min(roofline(float(k)) for k in np.geomspace(1.0, n.max(), 400))
    fitted = floor + slope * np.maximum(0.0, n - at)
    return {
        "knee": at,
        "floor_seconds": floor,
        "us_per_token": 1e6 * slope,
        "flat": at > 1.0 and off < 0.9 * roofline(0.0)[0],
        "error": float(np.median(np.abs(fitted / bare - 1.0))),
    }


def summarise(model: CostModel, rounds: Sequence[Sequence[Cell]], before: CostModel | None) -> dict[str, Any]:
    """All of it as data. `before`: fitted without the last round, which then tests it."""
    cells = merge(rounds)
    rejected = {(c.requests, c.k, c.prompt): c.seconds for c in cells if c.all_accepted is False}
    accepted = {(c.requests, c.k, c.prompt): c.seconds for c in cells if c.all_accepted}
    both = [s / rejected[spot] for spot, s in accepted.items() if spot in rejected]
    most = max(c.tokens for c in cells)
    measured: dict[Any, list[float]] = defaultdict(list)
    for c in (c for one in rounds for c in one):
        measured[c.spot].append(c.seconds)
    return {
        "cells": [
            asdict(c)
            | {
                "tokens": c.tokens,
                "fit": model.seconds(c.tokens, c.context_tokens, c.requests),
                "seconds_by_round": measured[c.spot],
            }
            for c in cells
        ],
        "error": errors(model, cells),
        "error_held_out": errors(before, rounds[-1]) if before is not None else None,
        "error_online": model.error,
        "accepted_over_rejected": statistics.median(both) if both else None,
        "octaves": octaves(model, most),
        "most": most,
        "doubles": doubles(model, most),
        "knee": knee(cells, model.c_context),
        "ms_per_1000_context_tokens": 1e6 * model.c_context,
        "line": {"c0": model.c0, "c1": model.c1},
    }


def table(result: dict[str, Any]) -> Table:
    """Milliseconds of a step by requests and K, accepted / rejected, and the tokens to accept that pay for K."""
    cells = [c for c in result["cells"] if c["prompt"] == min(x["prompt"] for x in result["cells"])]
    at = {(c["requests"], c["k"], c["all_accepted"]): c["seconds"] for c in cells}
    ks = sorted({c["k"] for c in cells})
    t = Table(title="a step in ms, drafts accepted / rejected (tokens per request to be accepted, to break even)")
    t.add_column("requests", justify="right")
    for k in ks:
        t.add_column(f"K={k}" if k else "none", justify="right")
    for b in sorted({c["requests"] for c in cells}):
        row = []
        none = at.get((b, 0, None))
        for k in ks:
            if not k:
                row.append(f"{1e3 * none:.1f}" if none else "-")
                continue
            both = [at.get((b, k, accepted)) for accepted in (True, False)]
            text = " / ".join(f"{1e3 * s:.1f}" if s else "-" for s in both)
            known = [s for s in both if s]
            if none and known:
                text += f" ({max(0.0, statistics.mean(known) / none - 1.0):.2f})"
            row.append(text)
        t.add_row(str(b), *row)
    e, unseen, kn = result["error"], result["error_held_out"], result["knee"]
    lines = [
        f"fit: median error {e['median']:.1%}, p90 {e['p90']:.1%}, most {e['max']:.1%} ({e['worst']}) "
        f"of {e['cells']} cells (goal: median at most 10 %)"
    ]
    if unseen:
        lines[0] += f"; on a round it had not seen {unseen['median']:.1%}, p90 {unseen['p90']:.1%}"
    if result["accepted_over_rejected"]:
        lines.append(f"accepted over rejected, same step: {result['accepted_over_rejected']:.3f}, median of cells")
    lines.append(
        f"knee: {kn['knee']:.0f} tokens per step (flat at {1e3 * kn['floor_seconds']:.1f} ms below, "
        f"{kn['us_per_token']:.0f} us per token above; the roofline's own median error is {kn['error']:.1%})"
        if kn["flat"]
        else "knee: none, a step costs more with every token"
    )
    twice = result["doubles"]
    lines[-1] += f"; twice the time of one token: at {twice}" if twice else "; twice the time of one token: not reached"
    lines.append(f"context: {result['ms_per_1000_context_tokens']:.3f} ms per 1,000 context tokens of the batch")
    t.caption = "\n".join(lines)
    return t


def curves(result: dict[str, Any]) -> Table:
    """The fitted curve by octaves of tokens per step."""
    t = Table(title="fitted curve, no context")
    for column in ("tokens", "ms", "us per token more"):
        t.add_column(column, justify="right")
    for o in result["octaves"]:
        t.add_row(f"{o['from']:.0f}-{o['to']:.0f}", f"{1e3 * o['seconds']:.2f}", f"{o['us_per_token']:.1f}")
    return t


def picture(model: CostModel, result: dict[str, Any], path: Path) -> Path | None:
    """Cells and fit over tokens per step, and over the context tokens; None where matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
        from matplotlib.ticker import FuncFormatter
    except ImportError:
        return None
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    cells, kn = result["cells"], result["knee"]
    short = min(c["prompt"] for c in cells)
    sizes = sorted({c["requests"] for c in cells})
    colour = dict(zip(sizes, _colours(len(sizes)), strict=True))
    for c in cells:
        if c["prompt"] == short:
            face = "none" if c["all_accepted"] is False else colour[c["requests"]]
            left.plot(c["tokens"], 1e3 * c["seconds"], "o", color=colour[c["requests"]], markerfacecolor=face, ms=5)
    n = np.arange(1, result["most"] + 1)
    fitted = 1e3 * model.curve(1, result["most"] - 1)
    left.plot(n, fitted, color="black", lw=1.3)
    if kn["flat"]:
        roof = kn["floor_seconds"] + 1e-6 * kn["us_per_token"] * np.maximum(0.0, n - kn["knee"])
        left.plot(n, 1e3 * roof, "--", color="firebrick", lw=1)
        left.axvline(kn["knee"], ls=":", color="firebrick", lw=1)
    left.set(xscale="log", yscale="log", xlabel="tokens that go through the target in a step", ylabel="ms per step")
    left.set_ylim(bottom=0.7 * min(1e3 * min(c["seconds"] for c in cells), fitted[0]),
                  top=1.4 * max(1e3 * max(c["seconds"] for c in cells), fitted[-1]))  # fmt: skip
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    left.set_xticks([2**i for i in range(0, result["most"].bit_length(), 2)])
    for axis in (left.xaxis, left.yaxis):
        axis.set_major_formatter(plain)
    left.minorticks_off()
    low, high = left.get_ylim()
    left.set_yticks([t for e in range(-2, 6) for t in (10.0**e, 2 * 10.0**e, 5 * 10.0**e) if low <= t <= high])
    marks = [Line2D([], [], marker="o", ls="", color=colour[b], label=f"{b} requests") for b in sizes]
    marks += [
        Line2D([], [], marker="o", ls="", color="grey", label="accepted, or no drafts"),
        Line2D([], [], marker="o", ls="", color="grey", markerfacecolor="none", label="rejected"),
        Line2D([], [], color="black", label="fit, no context"),
    ]
    if kn["flat"]:
        marks.append(Line2D([], [], color="firebrick", ls="--", label=f"roofline, knee at {kn['knee']:.0f} tokens"))
    left.legend(handles=marks, fontsize=8, frameon=False, loc="upper left")
    e = result["error"]
    left.set_title(f"step time; the fit's error: median {e['median']:.1%}, p90 {e['p90']:.1%}", fontsize=10)
    by: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    longer = {(c["requests"], c["k"]) for c in cells if c["prompt"] > short}
    for c in cells:
        if (c["requests"], c["k"]) in longer and c["all_accepted"] is not True:
            by[c["requests"], c["k"]].append(c)
    for (b, k), some in sorted(by.items()):
        some.sort(key=lambda c: c["context_tokens"])
        context_tokens = [c["context_tokens"] for c in some]
        right.plot(context_tokens, [1e3 * c["seconds"] for c in some], "o", color=colour[b],
                   markerfacecolor="none" if k else colour[b])  # fmt: skip
        right.plot(context_tokens, [1e3 * c["fit"] for c in some], "-" if not k else "--", color=colour[b], lw=1,
                   label=f"{b} x {1 + k} tokens")  # fmt: skip
    right.set(xlabel="context tokens of the batch", ylabel="ms per step", ylim=(0, None))
    right.set_title("over context: measured (dots) and fit (lines)", fontsize=10)
    if by:
        right.legend(fontsize=8, frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=130)
    return path


def _colours(count: int) -> list[Any]:
    from matplotlib import colormaps

    return [colormaps["viridis"](0.9 * i / max(count - 1, 1)) for i in range(count)]
