"""Host time of drafting: `DraftEngine.step` per step and per request, without an engine, on texts of known repeat rate.

In the fourth epoch, with three of history. Times are of this thread on the CPU; runs do the same steps, because the
tuner is given times that no clock decides, so each step counts with its fastest run.
"""

from __future__ import annotations

import functools
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import harness
from benchmarks.harness import RESULTS, provenance, save
from rollspec import RollspecConfig
from rollspec.step import DraftEngine

LENGTH = 200
EPOCHS = 3
"""Of history."""

BATCHES = (1, 8, 32, 64)
CHANGED = 0.05  # of the tokens differ from the previous round


def texts(batch: int, rng: random.Random) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts (groups of eight share one) and this round's texts."""
    base = [random.Random(g).choices(range(3, 60), k=LENGTH) for g in range((batch + 7) // 8)]
    changed = [[t if rng.random() > CHANGED else rng.randrange(3, 60) for t in base[i // 8]] for i in range(batch)]
    return [base[i // 8][:20] for i in range(batch)], changed


@functools.cache
def _steps() -> dict[int, float]:
    """Milliseconds of the demo's engine's decode steps by batch, as `bench control` measured them last."""
    found = json.loads((RESULTS / "control.json").read_bytes())
    return {int(batch): harness.step_ms(found, batch) for batch in found["seconds"]["off"]}


def step_ms(tokens: float) -> float:
    """What the demo's engine takes for a step that computes so many tokens: on the line of two that were measured."""
    (low, short), (high, long) = _steps().items()
    return short + (tokens - low) * (long - short) / (high - low)


def last_epoch(batch: int) -> list[float]:
    """Seconds of each step with all its requests in the last epoch."""
    engine = DraftEngine(RollspecConfig.load("default", env={}), 4096)
    engine.tuner.host = lambda *_: None  # type: ignore[method-assign]  # else what is drafted depends on the machine
    rng = random.Random(1)
    times: list[float] = []
    for epoch in range(EPOCHS + 1):
        engine.set_version(epoch)
        prompts, said = texts(batch, rng)
        at, drafts = [0] * batch, [[] for _ in range(batch)]  # type: list[int], list[list[int]]
        names = [f"{epoch}-{i}" for i in range(batch)]
        for name, prompt in zip(names, prompts, strict=True):
            engine.begin(name, prompt, LENGTH)
        while live := [i for i in range(batch) if at[i] < LENGTH]:
            new, scheduled = [], {}
            for i in live:
                n = 0
                while n < len(drafts[i]) and drafts[i][n] == said[i][at[i] + n]:
                    n += 1
                new.append(said[i][at[i] : at[i] + n + 1])
                at[i] += n + 1
                scheduled[names[i]] = drafts[i]
            ids = [names[i] for i in live]
            start = time.thread_time()
            out = engine.step(ids, new, scheduled)
            if len(live) == batch and epoch == EPOCHS:
                times.append(time.thread_time() - start)
            tokens = len(live) + sum(map(len, scheduled.values()))
            engine.timed(tokens, True, 1e-3 * step_ms(tokens), len(live))
            for i, draft in zip(live, out, strict=True):
                drafts[i] = draft
        for name in names:
            engine.finish(name)
    return times


def run(quick: bool = False, out: Path | None = None) -> Path:
    """Print and save the table."""
    rounds = 1 if quick else 15
    began = provenance()
    results: dict[str, Any] = {}
    table = Table(title=f"drafting with {EPOCHS} epochs of history (no engine)")
    for column in ("batch", "ms per step", "of the demo's step", "us per request"):
        table.add_column(column, justify="right")
    for batch in BATCHES:
        runs = [last_epoch(batch) for _ in range(rounds)]
        ms = 1e3 * statistics.mean(map(min, zip(*runs, strict=True)))
        r = results[str(batch)] = {
            "ms_per_step": ms,
            "ms_per_step_range": [1e3 * f(statistics.mean(run) for run in runs) for f in (min, max)],
            "share_of_step": ms / step_ms(batch),
            "us_per_request": 1e3 * ms / batch,
        }
        table.add_row(
            str(batch),
            f"{ms:.2f}",
            f"{r['share_of_step']:.1%} of {step_ms(batch):.0f} ms",
            f"{r['us_per_request']:.1f}",
        )
    Console(stderr=True).print(table)
    return save(
        "propose" + ("-quick" if quick else ""),
        {"benchmark": "propose", "provenance": began, "rounds": rounds, "batches": results},
        out,
    )
