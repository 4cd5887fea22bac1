"""What the arms of the example reached: numbers, a table, and one picture over the requests."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.harness import ratio
from examples.production_traffic.traffic import Burst, Plan

NAMES = {"none": "no speculation", "frozen": "frozen drafter", "online": "online drafter"}
COLOURS = {"none": "#8a8f98", "frozen": "#c98a2b", "online": "#2b6cb0"}
RECOVERED = 0.9  # of the converged excess acceptance length
CONVERGED = 3  # last bursts of a phase that say where it converged


def phases(plan: Plan) -> list[range]:
    """Numbers of the bursts of each phase."""
    out, at = [], 0
    for _, count in plan.phases:
        out.append(range(at, at + count))
        at += count
    return out


def summarize(plan: Plan, arms: Mapping[str, Sequence[Burst]]) -> dict[str, Any]:
    """Numbers of a finished run.

    `requests_to_recover`: requests of a phase until tokens per step beyond the first one were at 90 % of what the last
    bursts of the phase had; `requests_to_first`: of what the last bursts of the first phase had, whose topic may be an
    easier one. None where that was never so.
    """
    out: dict[str, Any] = {"arms": {}, "phases": [{"domain": d, "bursts": n} for d, n in plan.phases]}
    for name, bursts in arms.items():
        rows = []
        for part in phases(plan):
            inside = [bursts[i] for i in part]
            last = inside[-CONVERGED:]
            converged = statistics.fmean(b.length for b in last)
            first = rows[0]["acceptance_length"] if rows else converged
            rows.append(
                {
                    "tokens_per_second": sum(b.tokens for b in inside) / sum(b.seconds for b in inside),
                    "tokens_per_second_at_end": sum(b.tokens for b in last) / sum(b.seconds for b in last),
                    "acceptance_length_first": inside[0].length,
                    "acceptance_length": converged,
                    "requests_to_recover": _requests_until(converged, inside, plan),
                    "requests_to_first": _requests_until(first, inside, plan),
                    "failed": sum(b.failed for b in inside),
                    "altered": sum(_altered(arms["none"][i], bursts[i]) for i in part) if "none" in arms else None,
                    "versions": len({b.version for b in inside} - {0}),
                }
            )
        out["arms"][name] = rows
    if {"online", "frozen"} <= out["arms"].keys():
        online, frozen = (out["arms"][n] for n in ("online", "frozen"))
        pairs = zip(online, frozen, strict=True)
        out["online_over_frozen"] = [a["tokens_per_second_at_end"] / b["tokens_per_second_at_end"] for a, b in pairs]
    if {"online", "none"} <= out["arms"].keys():
        pairs = zip(out["arms"]["online"], out["arms"]["none"], strict=True)
        out["online_over_none"] = [a["tokens_per_second_at_end"] / b["tokens_per_second_at_end"] for a, b in pairs]
    return out


def pairs(plan: Plan, seeds: Sequence[Mapping[str, Sequence[Burst]]]) -> dict[str, list[dict[str, Any]]]:
    """Tokens per second of the online drafter over the other servers' in each phase, burst by burst, over all seeds: of
    servers that took turns.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for other in ("frozen", "none"):
        for part in phases(plan):
            rates = [
                (s["online"][i].rate, s[other][i].rate) for s in seeds if {"online", other} <= s.keys() for i in part
            ]
            if rates:
                found.setdefault(other, []).append(asdict(ratio([a for a, _ in rates], [b for _, b in rates])))
    return found


def sentences(plan: Plan, summary: Mapping[str, Any]) -> list[str]:
    """The online drafter over the others, phase by phase."""
    out = []
    for other in ("frozen", "none"):
        found: Sequence[Any] = summary.get("pairs", {}).get(other) or summary.get(f"online_over_{other}") or ()
        said = [
            f"{d} {r:.2f}x" if isinstance(r, float) else f"{d} {r['median']:.2f}x ({r['low']:.2f}-{r['high']:.2f})"
            for (d, _), r in zip(plan.phases, found, strict=False)
        ]
        of = "by bursts, median and 95 %" if summary.get("pairs") else "at the end of"
        if said:
            out.append(f"online over {NAMES[other]}, tokens/s {of}: {', '.join(said)}")
    return out


def _requests_until(length: float, phase: Sequence[Burst], plan: Plan) -> int | None:
    """Requests of a phase until 90 % of an acceptance length, counted from its first token on."""
    back = next((b for b in phase if b.length >= 1 + RECOVERED * (length - 1)), None)
    return None if back is None or length <= 1 else back.requests - (phase[0].requests - plan.burst)


def _altered(reference: Burst, other: Burst) -> int:
    """Requests whose greedy answer is not that of the server without speculation."""
    return sum(a != b for a, b in zip(reference.answers, other.answers, strict=True))


def rows(plan: Plan, summary: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A line per arm and phase: arm, domain, tokens/s at the end, acceptance length at its start and end, requests to
    recover what the phase ended with, and what the first phase ended with.
    """
    out: list[tuple[str, ...]] = []
    for name, found in summary["arms"].items():
        for (domain, _), row in zip(plan.phases, found, strict=True):
            back, first = (row.get(f"requests_to_{what}") for what in ("recover", "first"))
            out.append(
                (
                    NAMES[name], domain, f"{row['tokens_per_second']:.0f}", f"{row['tokens_per_second_at_end']:.0f}",
                    f"{row['acceptance_length_first']:.2f}", f"{row['acceptance_length']:.2f}",
                    *("–" if name == "none" or n is None else str(n) for n in (back, first)), str(row["failed"]),
                    "–" if row["altered"] is None else str(row["altered"]),
                )
            )  # fmt: skip
    return out


HEAD = (
    "server",
    "traffic",
    "tokens/s",
    "(end)",
    "tokens/step",
    "(end)",
    "recovery",
    "of the first",
    "failed",
    "altered",
)
"""`(end)`: of a phase's last bursts; the acceptance length before it is that of the first burst."""


def draw(plan: Plan, arms: Mapping[str, Sequence[Burst]], path: Path) -> None:
    """Tokens per step, tokens per second and the drafter's version over the requests, as SVG or PNG by `path`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 1.4))
    for name, bursts in arms.items():
        x = [b.requests for b in bursts]
        style = {"color": COLOURS[name], "label": NAMES[name], "linewidth": 1.6}
        top.plot(x, [b.length for b in bursts], **style)
        middle.plot(x, [b.rate for b in bursts], **style)
        if name == "online":
            bottom.step(x, [b.version for b in bursts], where="post", **style)
    top.set_ylabel("tokens per request and step")
    middle.set_ylabel("tokens per second")
    middle.set_ylim(bottom=0)
    bottom.set_ylabel("version")
    bottom.set_xlabel("requests")
    for part, (domain, _) in zip(phases(plan), plan.phases, strict=True):
        begin, end = part.start * plan.burst, part.stop * plan.burst
        top.text((begin + end) / 2, 1.02, domain, transform=top.get_xaxis_transform(), ha="center", va="bottom")
        for axis in (top, middle, bottom):
            if begin:
                axis.axvline(begin, color="#999999", linewidth=0.8, linestyle=":")
    for axis in (top, middle, bottom):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", linewidth=0.4, alpha=0.5)
    middle.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=150)
