"""What a draft head adds on a real model: none, suffix drafts, head and suffix drafts, over fresh and repeated prompts.

    fresh     prompts that were never seen: suffix drafts have a prompt's siblings, and nothing where it is sampled once
    repeated  the same prompts again, right after: what a second epoch under the same policy is

Responses end by themselves: with lengths that are given, a response goes on after the model ended it, and a head that
was trained on whole ones does not know that text. Times are per token, as arms say other texts. Arms take turns, each
round has prompts of its own, each seed has engines of its own, and ratios are of pairs, by the clock and by the
engines' CPU time. The head drafts by rejection sampling, where its greedy drafts are accepted with at most the
likeliest token's probability, and coupled, with the target's noise or greedily. It stays as it is, or is trained
meanwhile: on the second core, or by the engine while that has nothing to do.
"""

from __future__ import annotations

import dataclasses
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.engines import Arm, Engine, Work
from benchmarks.harness import pin, provenance, save
from benchmarks.head_prompts import Prompts
from benchmarks.head_table import summarise, table
from benchmarks.turns import idle_cores

DEFAULT = ("none", "suffix", "head", "head, coupled")
ARMS = (*DEFAULT, "head, 4 passes", "head, coupled greedy", "head, trained", "head, idle")
TRAINED = {"head, trained": "dedicated", "head, idle": "idle"}
"""`drafter.mode` of the arms that train."""
BATCHES = (1, 4, 32)
ROUNDS = 6
EPOCHS = 2
SAMPLES = 4
REQUESTS = {1: 12, 4: 24, 32: 64}
"""Of a round, by batch size."""
MOST = 256  # tokens of a response
IDLE = 4.0  # seconds after an epoch in which an arm that trains has nothing else to do


def arm(name: str, head: Path, seed: int = 0, folder: Path | None = None) -> Arm:
    """An arm by name; `folder`: for the state of those that train."""
    both = {"preset": "default", "proposal.drafters": ["suffix", "eagle3"], "proposal.head.model": str(head)}
    more: dict[str, Any] = {
        "head": {},
        "head, 4 passes": {"proposal.head.k_max": 4},
        "head, coupled": {"mode": "coupled"},
        "head, coupled greedy": {"mode": "coupled", "coupled.drafts": "greedy"},
    } | {n: {"drafter.mode": mode, "drafter.dir": str((folder or Path()) / mode)} for n, mode in TRAINED.items()}
    fixed = {"none": None, "suffix": "default"}
    return Arm(name, rollspec=fixed[name] if name in fixed else both | more[name], seed=seed)


def workloads(epochs: int) -> tuple[str, ...]:
    """The epochs' names."""
    return ("fresh", "repeated", *(f"repeated {n}" for n in range(2, epochs)))[:epochs]


def run(
    model: Path,
    head: Path,
    prompts: Path | None = None,
    rounds: int = ROUNDS,
    batches: Sequence[int] = BATCHES,
    arms: Sequence[str] = DEFAULT,
    samples: int = SAMPLES,
    seeds: Sequence[int] = (0,),
    epochs: int = EPOCHS,
    held_out: Path | None = None,
    quick: bool = False,
    out: Path | None = None,
) -> Path:
    """The whole benchmark; prints tables and writes JSON after every batch size. `quick` only shows that it runs.

    `none` and `suffix` are always among the arms.
    """
    pin(apart=True)
    console = Console(stderr=True)
    began, clock = provenance(), time.monotonic()
    if quick:
        batches, rounds, seeds = batches[:1], 1, seeds[:1]
    sizes = {batch: max(1, REQUESTS.get(batch, 2 * batch) // samples) for batch in batches}
    # A round that warms engines up, and lets the tuner measure them, comes first.
    count = (rounds + 1) * sum(sizes.values())
    known = Prompts.of(model, prompts, head, held_out)
    orders = {seed: known.order(seed, count) for seed in seeds}
    facts = {seed: known.facts(order) for seed, order in orders.items()}
    if again := max(f["prompts_used_again"] for f in facts.values()):
        console.print(f"{again} of {count} prompts are not fresh: there are only {len(known.found)}; give more.")
    names = tuple(dict.fromkeys((*DEFAULT[:2], *arms)))
    result: dict[str, Any] = {
        "benchmark": "head",
        "provenance": began,
        "model": str(model),
        "head": str(head),
        "prompts": str(prompts) if prompts else "built in",
        "held_out": str(held_out) if held_out else None,
        "prompts_of_seeds": facts,
        "samples_per_prompt": samples,
        "epochs": workloads(epochs),
        "idle_seconds": IDLE,
        "idle_cores": {},
    }
    runs: dict[int, dict[int, dict[str, Any]]] = {batch: {} for batch in batches}
    for seed, texts in orders.items():
        longest = max(map(len, texts)) + MOST
        with tempfile.TemporaryDirectory(prefix="rollspec-head-", ignore_cleanup_errors=True) as folder:
            live: list[Engine] = []
            try:
                for name in names:
                    console.print(f"seed {seed}: start {name}", highlight=False)
                    live.append(Engine(arm(name, head, seed, Path(folder)), str(model), longest))
                result["idle_cores"][seed] = idle_cores(live)
                for engine in live:
                    engine.suspend()
                for number, (batch, size) in enumerate(sizes.items()):
                    at = (rounds + 1) * sum(list(sizes.values())[:number])
                    own: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in names}
                    for r in range(-1, rounds):
                        chosen = texts[at + (r + 1) * size : at + (r + 2) * size]
                        version = 1 + number * (rounds + 1) + r + 1
                        order = [p for p in chosen for _ in range(samples)]
                        random.Random(1000 * seed + version).shuffle(order)  # siblings start apart
                        for engine, done in _round(live, order, batch, epochs, version, r):
                            if r >= 0:
                                own[engine.arm.name].append(done)
                        spent = time.monotonic() - clock
                        console.print(f"seed {seed}, batch {batch}: round {max(r + 1, 0)}/{rounds}, {spent:.0f} s")
                    runs[batch][seed] = own
                    finished = {"load": provenance()["load"], "seconds": time.monotonic() - clock}
                    found = {str(b): _batch(by, epochs) for b, by in runs.items() if by}
                    path = save(
                        "head" + ("-quick" if quick else ""), {**result, "finished": finished, "batches": found}, out
                    )
            finally:
                for engine in live:
                    engine.resume()
                    engine.close()
    for b, batch_found in found.items():
        console.print(table(int(b), {w: batch_found[w] for w in workloads(epochs)}))
    return path


def _batch(by_seed: dict[int, dict[str, Any]], epochs: int) -> dict[str, Any]:
    """What is reported of one batch size: over all seeds, and of each."""
    every: dict[str, list[list[dict[str, Any]]]] = {}
    for own in by_seed.values():
        for name, rounds in own.items():
            every.setdefault(name, []).extend(rounds)
    names = workloads(epochs)
    return {
        **summarise(every, names),
        "by_seed": {seed: summarise(own, names) for seed, own in by_seed.items()},
        "runs": by_seed,
    }


def _round(live: Sequence[Engine], order: list[list[int]], batch: int, epochs: int, version: int, r: int) -> Any:
    """Every engine's epochs of one round, in turn."""
    work = Work(order, None, batch, 10 * version, most=MOST)
    for engine in live if r % 2 == 0 else list(reversed(live)):
        engine.resume()
        done = []
        for epoch in range(epochs):
            done.append(engine.run(dataclasses.replace(work, version=10 * version + 1 + epoch)))
            if engine.arm.name in TRAINED:
                time.sleep(IDLE)
        yield engine, done
        engine.suspend()
