"""What the installed plugin costs an engine that did not ask for it: paired, alternating runs of two live engines.

One engine loads rollspec's plugin, which stays inert; the other has it filtered out by `VLLM_PLUGINS`. Both decode
the same requests in turn, many short turns, and are started anew for every pair, because the machine's noise is larger
than what is looked for. What the plugin does per process and per engine is timed by itself, without an engine.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.drift import CACHE
from benchmarks.engines import Arm, Engine, Work
from benchmarks.harness import ROOT, pin, provenance, ratio, save
from benchmarks.turns import alternate, anew, idle_cores
from examples.demo.job import JobSettings, prepare_assets

MAX_LEN = 256
STARTS, TURNS = 12, 20
REQUESTS, LENGTH = 8, 32

HOOKS = """
import json, time, timeit, types
import pydantic, yaml, packaging.specifiers  # vLLM imports these itself
start = time.perf_counter()
from rollspec.engine.vllm import compat, plugin
loaded = time.perf_counter()
plugin.register()
registered = time.perf_counter()
engine = types.SimpleNamespace(additional_config={})
per_call = lambda f: min(timeit.repeat(f, number=1000, repeat=5)) / 1000
print(json.dumps({
    "import_ms": 1e3 * (loaded - start),
    "register_ms": 1e3 * (registered - loaded),
    "engine_us": 1e6 * (per_call(lambda: plugin._asked_for(engine))
                        + 3 * per_call(lambda: compat.engine_config(engine))),
}))
"""
"""What an engine that did not ask passes through: one look at its arguments, three at its configuration. Per step:
nothing."""


def hooks() -> dict[str, float]:
    """Cost of the plugin by itself: milliseconds per process, microseconds per engine."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ROLLSPEC")}
    done = subprocess.run(
        [sys.executable, "-c", HOOKS],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def run(quick: bool = False, out: Path | None = None) -> Path:
    """Print the ratio and save it."""
    pin()
    console = Console(stderr=True)
    began = provenance()
    assets = prepare_assets(JobSettings(), CACHE / "grpo_arithmetic")
    # The CPU patches come through the same plugin, so this comparison runs without them: it does not speculate.
    patches = {"ROLLSPEC_PATCHES": "none"}
    arms = [
        Arm("installed", environment=patches),
        Arm("filtered", environment={**patches, "VLLM_PLUGINS": "vllm_cpu_v2"}),
    ]
    starts, turns = (1, 4) if quick else (STARTS, TURNS)
    prompts = [[5, 6, 7, 8 + i] for i in range(REQUESTS)]
    work = Work(prompts, [LENGTH] * len(prompts), len(prompts), 0)
    alone, idle = hooks(), 0.0

    def measured(engines: list[Engine]) -> dict[str, dict[int, list[float]]]:
        nonlocal idle
        taken = alternate(engines, {0: work}, turns)
        for engine in engines:  # unpatched, they wait in a busy loop for a second
            engine.suspend()
        idle = max(idle, idle_cores(engines))
        for engine in engines:
            engine.resume()
        return taken

    seconds = {n: by_work[0] for n, by_work in anew(starts, arms, assets.model, MAX_LEN, measured).items()}
    found = ratio(seconds["installed"], seconds["filtered"])
    result: dict[str, Any] = {
        "benchmark": "inert",
        "provenance": began,
        "finished": {"load": provenance()["load"]},
        "starts": starts,
        "turns": turns,
        "requests": REQUESTS,
        "tokens_per_request": LENGTH,
        "installed_over_filtered": asdict(found),
        "hooks": alone,
        "idle_cores": idle,
        "median_seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "seconds": seconds,
    }
    console.print(
        f"plugin installed but off / plugin filtered out: {found.median:.4f} "
        f"(95 % interval {found.low:.4f}-{found.high:.4f}, {found.n} pairs); "
        f"{alone['import_ms'] + alone['register_ms']:.1f} ms per process, {alone['engine_us']:.1f} us per engine"
    )
    return save("inert" + ("-quick" if quick else ""), result, out)
