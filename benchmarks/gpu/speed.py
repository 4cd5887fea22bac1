"""What drafting gains on a real model with a real head: tokens per second by batch size, arm by arm.

Every arm does the same tokens: lengths are recorded once, without speculation, and replayed. Each round has prompts of
its own, which come twice (`fresh`, `repeated`). `none` runs first and last, so what a second engine of one kind differs
by is known.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from benchmarks.engines import Arm, Work, epoch
from benchmarks.gpu.engine import K, count_graphs, engine, graphs_replayed
from benchmarks.gpu.plan import NotHereError, Spec

BATCHES = (1, 4, 32)
REQUESTS = {1: 8, 4: 24, 32: 96}
"""Of a round, by batch size."""
ROUNDS = 3
MOST = 256
"""Tokens of a response."""


def arms(model_head: str) -> dict[str, tuple[dict[str, Any] | None, dict[str, Any] | None]]:
    """vLLM's own method and rollspec's configuration, by name."""
    own = {"method": "eagle3", "model": model_head, "num_speculative_tokens": K}
    both = {"preset": "default", "proposal.drafters": ["suffix", "eagle3"], "proposal.head.model": model_head}
    return {
        "none": (None, None),
        "suffix": (None, {"preset": "default"}),
        "head and suffix": (None, both),
        "eagle3 of vLLM": (own, None),
        "head and suffix, coupled": (None, both | {"mode": "coupled"}),
        "none again": (None, None),
    }


def measure(spec: Spec) -> dict[str, Any]:
    """Rows of (arm, batch, epoch) with tokens per second, acceptance and what rollspec counted."""
    if spec.model is None or spec.head is None:
        raise NotHereError("give --model and a --head of it")
    prompts = _prompts(spec)
    lengths: dict[tuple[int, int], list[int]] = {}
    found: dict[str, Any] = {}
    summary: list[dict[str, Any]] = []
    sizes = {1: 2} if spec.quick else REQUESTS
    rounds = 1 if spec.quick else ROUNDS
    for name, (speculative, rollspec) in arms(spec.head).items():
        with engine(spec, spec.model, speculative=speculative, rollspec=rollspec, max_model_len=MOST + 512) as llm:
            arm = Arm(name, rollspec=rollspec)
            llm.collective_rpc(count_graphs)
            found[name] = {}
            for batch, count in sizes.items():
                rows = found[name][str(batch)] = []
                for r in range(-1, rounds):  # the first one warms up, and lets the tuner measure
                    rng = random.Random(1000 * batch + r)
                    chosen = [rng.choice(prompts) for _ in range(count)]
                    if (batch, r) not in lengths:
                        own = epoch(llm, Work(chosen, None, batch, 0, most=MOST), arm)
                        lengths[batch, r] = own["lengths"]
                    version = 100 * batch + 10 * (r + 1)
                    both = [
                        epoch(llm, Work(chosen, lengths[batch, r], batch, version + again), arm) for again in range(2)
                    ]
                    both[-1]["graphs"] = llm.collective_rpc(graphs_replayed)[0]
                    if r >= 0:
                        rows.append(dict(zip(("fresh", "repeated"), both, strict=True)))
        rows = _summary(name, found)
        print(*rows, sep="\n", flush=True)  # into the log: all there is where the rest does not end
        summary += rows
    return {"model": Path(spec.model).name, "batches": list(sizes), "arms": found, "summary": summary}


def _summary(name: str, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Of an arm, per batch and epoch: tokens a second over all rounds, over those of `none`, tokens a verify step."""
    out = []
    for batch, rows in found[name].items():
        for when in ("fresh", "repeated"):
            mine, plain = ([r[when] for r in some] for some in (rows, found["none"][batch]))
            took, tokens = sum(r["seconds"] for r in mine), sum(r["tokens"] for r in mine)
            accepted, drafted = (sum(r[key] for r in mine) for key in ("accepted", "drafted"))
            out.append(
                {
                    "arm": name,
                    "batch": int(batch),
                    "epoch": when,
                    "tokens_per_second": tokens / took,
                    "over_none": sorted(p["seconds"] / m["seconds"] for p, m in zip(plain, mine, strict=True)),
                    "tokens_per_verification": tokens / max(1, tokens - accepted),
                    "drafted": drafted,
                    "accepted": accepted,
                    "graphs": [r["graphs"] for r in mine if "graphs" in r],
                    "faults": [f for r in mine for f in r.get("faults", ())],
                }
            )
    return out


def _prompts(spec: Spec) -> list[list[int]]:
    from drafter_online import prompts

    rows = prompts.read(None if spec.prompts is None else Path(spec.prompts))
    return prompts.tokenized(rows, str(spec.model), 512)[0]
