"""What becomes of the design with more replicas: a discrete-event simulation of versions, canaries and feedback.

events.py    a clock and queues
spread.py    a version from one place to N replicas: one after another, from a store, from each other
fleet.py     publications, one canary at a time, replicas that come, leave and die; how old what they run is
feedback.py  samples from N replicas to one trainer, at the rate that its budget allows
costs.py     what was measured here, what follows by arithmetic, what is assumed
limits.py    where each part binds, by arithmetic; the table
picture.py   the picture

rollspec bench scale
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.harness import QUICK, ROOT, provenance, save
from benchmarks.scale import costs, limits, picture
from benchmarks.scale.feedback import Feedback, feedback, rate_for
from benchmarks.scale.fleet import Fleet, simulate
from benchmarks.scale.spread import KINDS

REPLICAS = (8, 16, 32, 64, 128, 256, 512, 1024)
SEEDS = 3
SECONDS = 1800.0


def run(quick: bool = False, out: Path | None = None, measured_in: Path | None = None) -> Path:
    """Print the tables and save them, and a picture beside them.

    Args:
        quick: show that it runs.
        out: the JSON file.
        measured_in: an earlier result whose measured costs are taken instead of measuring anew.
    """
    began, console = provenance(), Console(stderr=True)
    if quick:
        console.print(QUICK)
    source = None
    if measured_in is None:
        measured = costs.measure(quick)
    else:
        measured, source = costs.earlier(measured_in)
    world = costs.world()
    replicas, seconds = (REPLICAS[:3], 300.0) if quick else (REPLICAS, SECONDS)
    rows = []
    for n in replicas:
        clock = time.perf_counter()
        rows.append(row(n, world, measured, seconds, 1 if quick else SEEDS))
        console.print(f"{n} replicas: simulated in {time.perf_counter() - clock:.1f} s", style="dim")
    result = {
        "provenance": began,
        "measured_provenance": source,
        "measured": asdict(measured),
        "assumed": asdict(world),
        "derived": costs.derived(world),
        "seconds": seconds,
        "replicas": rows,
        "limits": limits.limits(world, measured),
    }
    path = save("scale", result, out)
    picture.draw(result, ROOT / "docs" / "img" / "scale.svg" if out is None else path.with_suffix(".svg"))
    console.print(limits.table(result))
    for line in limits.sentences(result):
        console.print(line)
    return path


def row(n: int, world: costs.World, measured: costs.Measured, seconds: float, seeds: int) -> dict[str, Any]:
    """Everything about `n` replicas."""
    fleets = {}
    for kind in KINDS:
        runs = [simulate(Fleet.of(n, kind, world, measured), seconds, seed) for seed in range(seeds)]
        fleets[kind] = {name: sum(r[name] for r in runs) / len(runs) for name in runs[0]}
    churn = [simulate(Fleet.of(n, "tree", world, measured, churn=True), seconds, seed) for seed in range(seeds)]
    whole = feedback(Feedback.of(n, world, measured, 1.0), min(seconds, 900.0), 0)
    rate = rate_for(n, world, measured)
    budget = feedback(Feedback.of(n, world, measured, rate), min(seconds, 900.0), 0)
    return {
        "replicas": n,
        "fan_out": fleets,
        "elastic": {name: sum(r[name] for r in churn) / len(churn) for name in churn[0]},
        "feedback_all": whole,
        "feedback_budget": budget | {"rate": rate},
    }


if __name__ == "__main__":
    run("--quick" in sys.argv)
