"""Host time of drafting: `Engine.step` per request and per step, without an engine, on texts with a known repeat
rate.
"""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness import provenance, save
from rollspec import RollspecConfig
from rollspec.step import Engine

LENGTH = 200
CHANGED = 0.05  # of the tokens differ from the previous round


def texts(batch: int, rng: random.Random) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts (groups of eight share one) and this round's texts."""
    base = [random.Random(g).choices(range(3, 60), k=LENGTH) for g in range((batch + 7) // 8)]
    changed = [[t if rng.random() > CHANGED else rng.randrange(3, 60) for t in base[i // 8]] for i in range(batch)]
    return [base[i // 8][:20] for i in range(batch)], changed


def second_epoch(batch: int) -> dict[str, float]:
    """Microseconds per request of drafting in the second epoch, when trees are full."""
    proposer = Engine(RollspecConfig.load("default", env={}), 4096)
    rng = random.Random(1)
    for epoch in range(2):
        proposer.set_version(epoch)
        prompts, said = texts(batch, rng)
        at, drafts = [0] * batch, [[] for _ in range(batch)]  # type: list[int], list[list[int]]
        names = [f"{epoch}-{i}" for i in range(batch)]
        for name, prompt in zip(names, prompts, strict=True):
            proposer.begin(name, prompt, LENGTH)
        proposer.drain()
        times: list[float] = []
        while live := [i for i in range(batch) if at[i] < LENGTH]:
            new, scheduled = [], {}
            for i in live:
                n = 0
                while n < len(drafts[i]) and drafts[i][n] == said[i][at[i] + n]:
                    n += 1
                new.append(said[i][at[i] : at[i] + n + 1])
                at[i] += n + 1
                scheduled[names[i]] = drafts[i]
            start = time.perf_counter()
            out = proposer.step([names[i] for i in live], new, scheduled)
            if len(live) == batch:
                times.append(time.perf_counter() - start)
            tokens = len(live) + sum(map(len, scheduled.values()))
            proposer.timed(tokens, True, 0.009 + 0.0003 * tokens, len(live))
            for i, draft in zip(live, out, strict=True):
                drafts[i] = draft
        for name in names:
            proposer.finish(name)
    return {"us_per_step": 1e6 * statistics.median(times), "us_per_request": 1e6 * statistics.median(times) / batch}


def run(quick: bool = False, out: Path | None = None) -> Path:
    """Print and save the table."""
    rounds = 1 if quick else 7
    began = provenance()
    results: dict[str, Any] = {}
    table = Table(title="drafting, second epoch (no engine)")
    for column in ("batch", "us per step", "us per request", "min-max per request"):
        table.add_column(column, justify="right")
    for batch in (1, 8, 32, 64):
        runs = [second_epoch(batch) for _ in range(rounds)]
        per = [r["us_per_request"] for r in runs]
        results[str(batch)] = {
            "us_per_request": statistics.median(per),
            "us_per_request_range": [min(per), max(per)],
            "us_per_step": statistics.median(r["us_per_step"] for r in runs),
        }
        r = results[str(batch)]
        table.add_row(
            str(batch), f"{r['us_per_step']:.0f}", f"{r['us_per_request']:.1f}", f"{min(per):.1f}-{max(per):.1f}"
        )
    Console(stderr=True).print(table)
    return save(
        "propose" + ("-quick" if quick else ""),
        {"benchmark": "propose", "provenance": began, "rounds": rounds, "batches": results},
        out,
    )
