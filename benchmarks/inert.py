"""What the installed plugin costs an engine that did not ask for it: paired, alternating runs of two live engines.

One engine loads rollspec's plugin, which stays inert; the other has it filtered out by `VLLM_PLUGINS`. Both decode
the same requests in turn, many short rounds, because the machine's noise is larger than what is looked for.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.drift import CACHE
from benchmarks.harness import Arm, Engine, Work, pin, provenance, ratio, save
from rollspec.demo.job import JobSettings, prepare_assets

MAX_LEN = 256


def run(quick: bool = False, out: Path | None = None) -> Path:
    """Print the ratio and save it."""
    pin()
    console = Console(stderr=True)
    began = provenance()
    assets = prepare_assets(JobSettings(), CACHE / "grpo_arithmetic")
    # The CPU patches come through the same plugin, so this comparison runs without them: it does not speculate.
    patches = {"ROLLSPEC_PATCHES": "none"}
    arms = [Arm("installed", environment=patches), Arm("filtered", environment={**patches, "VLLM_PLUGINS": "none"})]
    rounds = 4 if quick else 40
    prompts = [[5, 6, 7, 8 + i] for i in range(8)]
    work = Work(prompts, [48] * len(prompts), len(prompts), 0)
    seconds: dict[str, list[float]] = {a.name: [] for a in arms}
    engines: list[Engine] = []
    try:
        for a in arms:
            engines.append(Engine(a, assets.model, MAX_LEN))
        for engine in engines:
            for _ in range(3):
                engine.run(work)
        for r in range(rounds):
            for engine in engines if r % 2 == 0 else reversed(engines):
                seconds[engine.arm.name].append(engine.run(work)["seconds"])
    finally:
        for engine in engines:
            engine.close()
    found = ratio(seconds["installed"], seconds["filtered"])
    result: dict[str, Any] = {
        "benchmark": "inert",
        "provenance": began,
        "rounds": rounds,
        "installed_over_filtered": asdict(found),
        "median_seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "seconds": seconds,
    }
    console.print(
        f"plugin installed but off / plugin filtered out: {found.median:.4f} "
        f"(95 % interval {found.low:.4f}-{found.high:.4f}, {found.n} pairs)"
    )
    return save("inert" + ("-quick" if quick else ""), result, out)
