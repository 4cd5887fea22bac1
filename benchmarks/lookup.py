"""Lookup by scan against suffix trees: accepted tokens, host time and memory on the same responses.

    python -m benchmarks.lookup

Four epochs are decoded with exact verification and without an engine, `batch` requests at a time, siblings together;
numbers are of the fourth. `fixed` verifies every drafted token up to K = 16; `goodput` what pays on a step of 9 ms plus
0.3 ms per token. Both lookups see the same requests in the same order and the same calibration.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rollspec.proposal.proposer import Proposer

from benchmarks.harness import provenance, save
from benchmarks.lookup_texts import Epoch, grpo_epochs, shared_spans
from rollspec import RollspecConfig

CACHE = Path("~/.cache/rollspec/lookup").expanduser()
BATCHES = (1, 16, 64)
STEP_MS = 18.0  # of the demo's engine at batch 64


class Tree:
    """arctic-inference's suffix tree, to be installed by hand, where a drafter keeps a corpus."""

    def __init__(self) -> None:
        from arctic_inference.suffix_decoding._C import SuffixTree

        self._tree = SuffixTree(32)
        self.extend, self.extend_ndarray = self._tree.extend, self._tree.extend_ndarray
        self.remove, self.estimate_memory = self._tree.remove, self._tree.estimate_memory

    def speculate(self, context: list[int], k: int, factor: float, min_prob: float) -> Any:
        """As `Corpus.speculate`."""
        return self._tree.speculate(context, k, factor, 0.0, min_prob, False)


class Clock:
    """Seconds spent in each of a step's calls."""

    def __init__(self, suffix: Any) -> None:
        self.seconds = {"draft": 0.0, "extend": 0.0}
        for name in self.seconds:
            setattr(suffix, name, self._timed(name, getattr(suffix, name)))

    def _timed(self, name: str, call: Any) -> Any:
        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args)
            finally:
                self.seconds[name] += time.perf_counter() - start

        return timed

    def take(self) -> dict[str, float]:
        """Seconds since the last call."""
        out = dict(self.seconds)
        for name in self.seconds:
            self.seconds[name] = 0.0
        return out


def decode(
    epochs: list[Epoch], lookup: str, budget: str, batch: int, most: int | None = None, **more: Any
) -> dict[str, Any]:
    """Decode all epochs; what the last one took, of `most` of its responses at most."""
    settings = {
        "proposal.budget.policy": budget, "tuning.policy": "static",
        "tuning.guard.enabled": False, **more,
    }  # fmt: skip
    p = Proposer(RollspecConfig.load("default", overrides=settings, env={}), 4096)
    if lookup == "tree":
        p.suffix._new_tree = Tree
        p.suffix._global = Tree()
    p.tuner.host = lambda *_: None  # type: ignore[method-assign]  # else what is worth drafting depends on the machine
    clock = Clock(p.suffix)
    times: list[dict[str, float]] = []
    for version, epoch in enumerate(epochs):
        p.set_version(version)
        last = version == len(epochs) - 1
        p.drain()
        for start in range(0, len(epoch[: most if last else None]), batch if last else 64):
            rows = epoch[start : start + (batch if last else 64)]
            times += _decode(p, rows, f"{version}-{start}", clock if last else None)
    stats = p.drain()
    times = times[5:]
    return {
        "accepted_per_request_step": stats.accepted / stats.requests,
        "drafted_per_request_step": stats.drafted / stats.requests,
        "acceptance": stats.accepted / max(1, stats.drafted),
        "by_source": {k: list(v) for k, v in stats.by_source.items()},
        "tokens": stats.emitted,
        "memory_bytes": memory(p),
        "ms": {k: 1e3 * statistics.median(t[k] for t in times) for k in times[0]},
        "ms_p90": {k: 1e3 * statistics.quantiles([t[k] for t in times], n=10)[-1] for k in times[0]},
    }


def memory(p: Proposer) -> int:
    """Bytes of all corpora, exactly."""
    groups = p.suffix._groups.values()
    return int(sum(g.tree.estimate_memory() for g in groups) + p.suffix._global.estimate_memory())


def _decode(p: Proposer, rows: Epoch, name: str, clock: Clock | None) -> list[dict[str, float]]:
    """One batch to its end; seconds of each step with all its requests, where there is a clock."""
    live = {f"{name}-{i}": text for i, (_, text) in enumerate(rows) if len(text) > 1}
    for i, (prompt, text) in enumerate(rows):
        if len(text) > 1:
            p.begin(f"{name}-{i}", prompt, len(text))
    at = dict.fromkeys(live, 0)
    drafts: dict[str, list[int]] = {}
    times: list[dict[str, float]] = []
    full = len(live)
    while live:
        new = []
        for r, text in live.items():
            draft = drafts.get(r, [])
            n = sum(1 for _ in itertools.takewhile(lambda ab: ab[0] == ab[1], zip(draft, text[at[r] :], strict=False)))
            new.append(text[at[r] : at[r] + n + 1])
            at[r] += n + 1
        ids = list(live)
        scheduled = {r: drafts[r] for r in ids if drafts.get(r)}
        if clock:
            clock.take()
        start = time.perf_counter()
        out = p.step(ids, new, scheduled)
        if clock and len(ids) >= full // 2:
            scale = full / len(ids)
            parts = {**clock.take(), "step": time.perf_counter() - start}
            times.append({k: v * scale for k, v in parts.items()})
        tokens = len(ids) + sum(map(len, scheduled.values()))
        p.timed(tokens, True, 0.009 + 0.0003 * tokens, len(ids))
        drafts = dict(zip(ids, out, strict=True))
        for r in ids:
            if at[r] >= len(live[r]):
                p.finish(r)
                del live[r]
    return times


def run(seeds: int = 1, out: Path | None = None) -> Path:
    """Print and save."""
    began = provenance()
    texts: dict[str, list[Epoch]] = {}
    for seed in range(seeds):
        texts[f"GRPO, seed {seed}"] = grpo_epochs(CACHE, seed=seed)
        texts[f"spans, seed {seed}"] = shared_spans(seed=seed)
    cells: list[dict[str, Any]] = []
    for (name, epochs), budget, lookup in itertools.product(texts.items(), ("fixed", "goodput"), ("tree", "scan")):
        cells.append({"texts": name, "budget": budget, "lookup": lookup, **decode(epochs, lookup, budget, 64)})
    save("lookup", {"benchmark": "lookup", "provenance": began, "cells": cells}, out)
    timed: list[dict[str, Any]] = []
    for (name, epochs), batch, lookup in itertools.product(list(texts.items())[:1], BATCHES, ("tree", "scan")):
        found = decode(epochs, lookup, "goodput", batch, most=max(4, 2 * batch))
        timed.append({"texts": name, "batch": batch, "lookup": lookup, "ms": found["ms"], "ms_p90": found["ms_p90"]})
    table = Table(title="fourth epoch, batch 64: per request and step")
    for column in ("texts", "budget", "lookup", "accepted", "drafted", "MB"):
        table.add_column(column, justify="left" if column in ("texts", "budget", "lookup") else "right")
    for c in cells:
        table.add_row(
            c["texts"], c["budget"], c["lookup"], f"{c['accepted_per_request_step']:.3f}",
            f"{c['drafted_per_request_step']:.3f}", f"{c['memory_bytes'] / 1e6:.2f}",
        )  # fmt: skip
    times = Table(title="host ms per step (median), three epochs of history")
    for column in ("texts", "batch", "lookup", "draft", "extend", "step", f"of {STEP_MS:g} ms"):
        times.add_column(column, justify="left" if column in ("texts", "lookup") else "right")
    for t in timed:
        ms = t["ms"]
        times.add_row(
            t["texts"], str(t["batch"]), t["lookup"], *(f"{ms[k]:.3f}" for k in ("draft", "extend", "step")),
            f"{(ms['draft'] + ms['extend']) / STEP_MS:.1%}",
        )  # fmt: skip
    console = Console(stderr=True)
    console.print(table)
    console.print(times)
    return save("lookup", {"benchmark": "lookup", "provenance": began, "cells": cells, "times": timed}, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    print(run(args.seeds, args.out))
