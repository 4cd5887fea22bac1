"""The null control: an engine with rollspec on and K = 0 against one without it. What differs is not drafting.

Both run in vLLM's second model runner, schedule asynchronously and have the same patches. They decode the same requests
in turn, at a fixed length; every speed-up that is printed elsewhere is to be read beside this ratio.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.drift import CACHE
from benchmarks.engines import Arm, Engine, Work, alternate, idle_cores
from benchmarks.harness import pin, provenance, ratio, save, verdict
from examples.demo.job import JobSettings, prepare_assets

BATCHES = (4, 32)
LENGTH = 96
ROUNDS = 24
GOAL = 0.02
"""How far from 1 the ratio of times may be."""

NOTHING = {"preset": "default", "tuning.strategy": "static", "tuning.arms": [0]}


def run(quick: bool = False, rounds: int = ROUNDS, model: Path | None = None, out: Path | None = None) -> Path:
    """Print the ratios and save them."""
    pin()
    console = Console(stderr=True)
    began = provenance()
    path = str(model) if model else prepare_assets(JobSettings(), CACHE / "grpo_arithmetic").model
    works = {
        batch: Work([[5, 6, 7, 8 + i] for i in range(batch)], [LENGTH] * batch, batch, 0)
        for batch in (BATCHES[:1] if quick else BATCHES)
    }
    engines: list[Engine] = []
    seconds: dict[str, dict[int, list[float]]] = {}
    try:
        engines += [Engine(a, path, 256) for a in (Arm("off"), Arm("on, K = 0", rollspec=NOTHING))]
        seconds = alternate(engines, works, 3 if quick else rounds)
        idle = idle_cores(engines)
    finally:
        for engine in engines:
            engine.close()
    found = {batch: ratio(seconds["on, K = 0"][batch], seconds["off"][batch]) for batch in works}
    for batch, r in found.items():
        console.print(
            f"batch {batch}: time with rollspec and nothing drafted / without: {r.median:.4f} "
            f"(95 % interval {r.low:.4f}-{r.high:.4f}, {r.n} pairs)"
        )
    result: dict[str, Any] = {
        "benchmark": "control",
        "provenance": began,
        "finished": {"load": provenance()["load"]},
        "model": path,
        "tokens_per_request": LENGTH,
        "on_over_off": {batch: asdict(r) for batch, r in found.items()},
        "at_most": {batch: verdict(r, 1 + GOAL) for batch, r in found.items()},
        "at_least": {batch: verdict(r, 1 - GOAL, most=False) for batch, r in found.items()},
        "idle_cores": idle,
        "seconds": seconds,
    }
    return save("control" + ("-quick" if quick else ""), result, out)
