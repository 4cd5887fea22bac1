"""What strategies lose in simulated environments whose best arm is known: throughput as a share of the oracle's, which
plays the best arm of every step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.harness import Ratio, provenance, ratio, save
from benchmarks.simulate import ENVIRONMENTS, Environment, play
from rollspec.tuning.strategies import make

STRATEGIES = ("hedge", "ucbspec", "exp3spec", "beg_mab", "thompson")
FIXED = "static best"  # the one arm that is best in hindsight
SEEDS = 10


def options(environment: str, strategy: str) -> dict[str, Any]:
    """Defaults, save that BanditSpec's own setting has BanditSpec's own reward."""
    return {"reward": "length"} if environment == "drafters" and strategy in ("ucbspec", "exp3spec") else {}


def throughput(name: str, env: Environment, strategy: str, seed: int) -> float:
    """Tokens per second."""
    if strategy == FIXED:
        return env.throughput(np.full(env.steps, env.best_fixed()))
    return play(make(strategy, env.arms, options(name, strategy), seed), env).throughput


def run(quick: bool = False, out: Path | None = None) -> Path:
    """Print and save the table."""
    steps = 500 if quick else 4000
    began = provenance()
    console = Console(stderr=True)
    strategies = (FIXED, *STRATEGIES)
    results: dict[str, Any] = {}
    table = Table(title=f"throughput / oracle, {steps} steps: median of {SEEDS} seeds (least-most)")
    table.add_column("environment")
    for strategy in strategies:
        table.add_column(strategy, justify="right")
    for name, make_environment in track(ENVIRONMENTS.items(), "simulating", console=console, transient=True):
        environments = [make_environment(steps, seed) for seed in range(SEEDS)]
        oracle = [env.throughput(env.optimal()) for env in environments]
        row: dict[str, Any] = {}
        for strategy in strategies:
            got = [throughput(name, env, strategy, seed) for seed, env in enumerate(environments)]
            share: Ratio = ratio(got, oracle)
            pairs = [a / b for a, b in zip(got, oracle, strict=True)]
            row[strategy] = {"options": options(name, strategy), "share": share, "range": [min(pairs), max(pairs)]}
        results[name] = row
        table.add_row(
            name, *(f"{r['share'].median:.3f} ({r['range'][0]:.3f}-{r['range'][1]:.3f})" for r in row.values())
        )
    console.print(table)
    return save(
        "bandits" + ("-quick" if quick else ""),
        {"benchmark": "bandits", "provenance": began, "steps": steps, "seeds": SEEDS, "environments": results},
        out,
    )
