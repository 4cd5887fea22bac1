"""What a draft head adds on a real model: none, drafts from memory, head and memory, over fresh and repeated prompts.

    fresh     prompts that were never seen: memory has the siblings of a prompt, and nothing where it is sampled once
    repeated  the same prompts again, right after: what a second epoch under the same policy is

Every arm does the same tokens: lengths are recorded once, without speculation, and replayed. Arms take turns, each
round has prompts of its own, and ratios are of pairs. Two arms draft with the head: by rejection sampling, where its
greedy drafts are accepted with at most the likeliest token's probability, and coupled, where they are drawn with the
target's noise.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.engines import Arm, Engine, Work, idle_cores
from benchmarks.harness import pin, provenance, ratio, save

ARMS = ("none", "memory", "head", "head, coupled")
BATCHES = (1, 4, 32)
ROUNDS = 6
SAMPLES = 4
REQUESTS = {1: 12, 4: 24, 32: 64}
"""Of a round, by batch size."""
MOST = 128  # tokens of a response
WORKLOADS = ("fresh", "repeated")


def arm(name: str, head: Path) -> Arm:
    """An arm by name."""
    learned = {"preset": "default", "proposal.drafters": ["suffix", "eagle3"], "proposal.learned.model": str(head)}
    rollspec: dict[str, Any] = {
        "none": None,
        "memory": "default",
        "head": learned,
        "head, coupled": learned | {"mode": "coupled"},
    }
    return Arm(name, rollspec=rollspec[name])


def prompts_of(model: Path, file: Path | None, count: int) -> list[list[int]]:
    """Token ids of `count` prompts, in a random order that is always the same.

    Raises:
        TrainingError: the file cannot be used.
    """
    from drafter_online import prompts

    rows = prompts.built_in() if file is None else prompts.read(file)
    found, _ = prompts.tokenized(rows, model, 1024)
    random.Random(0).shuffle(found)
    return [found[i % len(found)] for i in range(count)]


def summarise(runs: dict[str, list[list[dict[str, Any]]]]) -> dict[str, Any]:
    """Speed-ups over none and over memory, and acceptance, by workload and arm; `runs`: arm -> rounds -> workloads."""
    out: dict[str, Any] = {}
    for at, workload in enumerate(WORKLOADS):
        seconds = {name: [one[at]["seconds"] for one in rounds] for name, rounds in runs.items()}
        out[workload] = {}
        for name, rounds in runs.items():
            every = [one[at] for one in rounds]
            tokens, accepted, drafted = (sum(e[k] for e in every) for k in ("tokens", "accepted", "drafted"))
            by: dict[str, list[float]] = {}
            for e in every:
                for source, counts in (e.get("by_source") or {}).items():
                    by[source] = [a + b for a, b in zip(by.get(source, [0.0] * len(counts)), counts, strict=True)]
            out[workload][name] = {
                "speedup_over_none": asdict(ratio(seconds["none"], seconds[name])),
                "speedup_over_memory": asdict(ratio(seconds["memory"], seconds[name])) if "memory" in runs else None,
                "tokens_per_second": tokens / sum(seconds[name]),
                "acceptance_length": tokens / (tokens - accepted),
                "acceptance_rate": accepted / drafted if drafted else None,
                "by_source": by,
                "pass_over_step": _pass(every),
            }
    return out


def _pass(epochs: Sequence[dict[str, Any]]) -> float | None:
    """Seconds of a pass of the head over those of an engine step without its passes; None where none was run."""
    passes, seconds = (sum(e.get(k) or 0 for e in epochs) for k in ("passes", "pass_seconds"))
    steps, every = (sum(e.get(k) or 0 for e in epochs) for k in ("engine_steps", "engine_seconds"))
    return float(seconds / passes / ((every - seconds) / steps)) if passes and steps else None


def table(batch: int, result: dict[str, Any]) -> Table:
    """One batch size for people."""
    t = Table(title=f"batch {batch}")
    for column in ("prompts", "arm", "tokens/s", "over none", "over memory", "tokens per step", "accepted"):
        t.add_column(column, justify="left" if column in ("prompts", "arm") else "right")
    for workload, arms in result.items():
        for name, a in arms.items():
            shown = [
                f"{r['median']:.2f}x ({r['low']:.2f}-{r['high']:.2f})" if r else "-"
                for r in (a["speedup_over_none"], a["speedup_over_memory"])
            ]
            rate = a["acceptance_rate"]
            t.add_row(
                workload,
                name,
                f"{a['tokens_per_second']:.0f}",
                *shown,
                f"{a['acceptance_length']:.2f}",
                f"{100 * rate:.0f} %" if rate is not None else "-",
            )
    return t


def run(
    model: Path,
    head: Path,
    prompts: Path | None = None,
    rounds: int = ROUNDS,
    batches: Sequence[int] = BATCHES,
    arms: Sequence[str] = ARMS,
    samples: int = SAMPLES,
    quick: bool = False,
    out: Path | None = None,
) -> Path:
    """The whole benchmark; prints tables and writes JSON. `quick` only shows that it runs.

    `none` is always one of the arms.
    """
    pin(apart=True)
    console = Console(stderr=True)
    began, clock = provenance(), time.monotonic()
    if quick:
        batches, rounds = batches[:1], 1
    sizes = {batch: max(1, REQUESTS.get(batch, 2 * batch) // samples) for batch in batches}
    # A round that warms engines up, and lets the tuner measure them, comes first.
    texts = prompts_of(model, prompts, (rounds + 1) * sum(sizes.values()))
    live: list[Engine] = []
    found: dict[str, Any] = {}
    try:
        for name in (ARMS[0], *(a for a in arms if a != ARMS[0])):
            console.print(f"start {name}")
            live.append(Engine(arm(name, head), str(model), max(map(len, texts)) + MOST))
        idle = idle_cores(live)
        for engine in live:
            engine.suspend()
        version = 0
        for batch, size in sizes.items():
            runs: dict[str, list[list[dict[str, Any]]]] = {e.arm.name: [] for e in live}
            for r in range(-1, rounds):
                chosen, texts = texts[:size], texts[size:]
                version += 1
                for engine, done in _round(live, [p for p in chosen for _ in range(samples)], batch, version, r):
                    if r >= 0:
                        runs[engine.arm.name].append(done)
                console.print(f"batch {batch}: round {max(r + 1, 0)}/{rounds}, {time.monotonic() - clock:.0f} s")
            found[str(batch)] = {**summarise(runs), "runs": runs}
            console.print(table(batch, {w: found[str(batch)][w] for w in WORKLOADS}))
    finally:
        for engine in live:
            engine.resume()
            engine.close()
    result = {
        "benchmark": "head",
        "provenance": began,
        "finished": {"load": provenance()["load"], "seconds": time.monotonic() - clock},
        "model": str(model),
        "head": str(head),
        "prompts": str(prompts) if prompts else "built in",
        "samples_per_prompt": samples,
        "idle_cores": idle,
        "batches": found,
    }
    return save("head" + ("-quick" if quick else ""), result, out)


def _round(live: Sequence[Engine], order: list[list[int]], batch: int, version: int, r: int) -> Any:
    """Every engine's epochs of one round, in turn."""
    random.Random(version).shuffle(order)  # siblings start apart
    live[0].resume()  # without speculation: what it emitted is not in any history
    lengths = [min(MOST, n) for n in live[0].run(Work(order, None, batch, 10 * version))["lengths"]]
    live[0].suspend()
    for engine in live if r % 2 == 0 else list(reversed(live)):
        engine.resume()
        yield engine, [engine.run(Work(order, lengths, batch, 10 * version + 1 + i)) for i in range(len(WORKLOADS))]
        engine.suspend()
