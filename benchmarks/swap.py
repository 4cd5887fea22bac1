"""What swaps of drafter weights and the capture of training samples cost a running engine.

Swap: requests decode without a pause while weights that alternate between two versions are swapped in again and again;
the pause of each is set against the median decode step without one. Capture: rounds with it on and off, paired and
alternating in one engine.

    python -m benchmarks.swap [--quick]
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.drift import CACHE
from benchmarks.harness import pin, provenance, ratio, save
from rollspec.demo.job import JobSettings, prepare_assets

MAX_LEN = 512
REQUESTS, LENGTH = 8, 256


def run(quick: bool = False, out: Path | None = None) -> Path:
    """Print the numbers and save them."""
    pin()
    os.environ.update(VLLM_ALLOW_INSECURE_SERIALIZATION="1", VLLM_LOGGING_LEVEL="ERROR")
    began = provenance()
    console = Console(stderr=True)
    model = prepare_assets(JobSettings(), CACHE / "grpo_arithmetic").model
    from vllm import LLM

    llm = LLM(
        model=model,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=MAX_LEN,
        max_num_seqs=64,
        enable_prefix_caching=False,
        disable_log_stats=False,
        additional_config={
            "rollspec": {
                "proposal.drafters": ["suffix", "eagle3"],
                "proposal.learned.folder": str(CACHE / "heads"),
                "proposal.budget.policy": "fixed",  # everything is drafted: as much as there can be to disturb
                "tuning.policy": "static",
                "tuning.guard.enabled": False,
                "drafter.capture.enabled": True,
                "drafter.capture.share": 1.0,
            }
        },
    )
    try:
        result = {"provenance": began, "swap": swaps(llm, 6 if quick else 200), "capture": captures(llm, quick)}
    finally:
        llm.llm_engine.engine_core.shutdown()
    result["load_after"] = os.getloadavg()
    s, c = result["swap"], result["capture"]
    console.print(
        f"swap: median pause {s['pause_ms']['median']:.2f} ms, p99 {s['pause_ms']['p99']:.2f} ms, longest "
        f"{s['pause_ms']['longest']:.2f} ms; a decode step takes {s['step_ms']:.2f} ms; {s['swaps']} swaps"
    )
    for batch, row in c.items():
        console.print(
            f"capture at batch {batch}: time with / without {row['ratio'].median:.4f} [{row['ratio'].low:.4f}, "
            f"{row['ratio'].high:.4f}]; share of the step by the clock inside {row['share']:.4f}"
        )
    return save("swap", result, out)


def swaps(llm: Any, count: int) -> dict[str, Any]:
    """Pauses of `count` swaps between the steps of a running batch, and a step without one."""
    from safetensors.torch import load_file, save_file

    head = Path(_call(llm, "info")["drafter"]["started_with"])
    other = CACHE / "heads" / "other"
    other.mkdir(parents=True, exist_ok=True)
    save_file({n: t * 0.98 for n, t in load_file(head / "model.safetensors").items()}, other / "model.safetensors")
    core = llm.llm_engine
    pauses: list[float] = []
    stages: list[float] = []
    steps: list[float] = []
    version = _call(llm, "info")["drafter"]["version"]
    fed = 0
    while len(pauses) < count:
        while core.get_num_unfinished_requests() < REQUESTS:
            _add(core, f"swap-{fed}")
            fed += 1
        for _ in range(6):
            begin = time.perf_counter()
            core.step()
            steps.append(time.perf_counter() - begin)
        if _call(llm, "info")["drafter"]["state"] == "settled":
            version += 1
            folder = str(other if version % 2 else head)
            answer = _call(llm, "swap", dir=folder, version=version, canary=False)
            if "error" in answer:
                raise RuntimeError(answer["error"])
            while _call(llm, "info")["drafter"]["version"] != version:
                core.step()
            last = _call(llm, "info")["drafter"]["last"]
            pauses.append(last["pause_ms"])
            stages.append(last["stage_ms"])
    _drain(core)
    ordered = sorted(pauses)
    return {
        "swaps": len(pauses),
        "pause_ms": {
            "median": statistics.median(pauses),
            "p99": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
            "longest": ordered[-1],
        },
        "stage_ms": statistics.median(stages),
        "step_ms": 1e3 * statistics.median(steps),
    }


def captures(llm: Any, quick: bool) -> dict[str, Any]:
    """Time with capture over time without it, per batch size; pairs in alternating order."""
    out: dict[str, Any] = {}
    for batch in (1, 8, 32):
        on: list[float] = []
        off: list[float] = []
        share: list[float] = []
        for r in range(2 if quick else 24):
            for enabled in (True, False) if r % 2 else (False, True):
                llm.collective_rpc(_set_rate, args=(1.0 if enabled else 0.0,))
                _call(llm, "stats")
                begin = time.perf_counter()
                for i in range(batch):
                    _add(llm.llm_engine, f"capture-{batch}-{r}-{enabled}-{i}", 64)
                _drain(llm.llm_engine)
                (on if enabled else off).append(time.perf_counter() - begin)
                stats = _call(llm, "stats")
                if enabled:
                    share.append(stats["drafter"]["capture_seconds"] / stats["step_seconds"])
        out[str(batch)] = {"ratio": ratio(on[1:], off[1:]), "share": statistics.median(share)}
    return out


def _add(core: Any, name: str, length: int = LENGTH) -> None:
    from vllm import SamplingParams

    rng = random.Random(name)
    prompt = [rng.randrange(5, 250) for _ in range(24)]
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
    core.add_request(name, {"prompt_token_ids": prompt}, params)


def _drain(core: Any) -> None:
    while core.has_unfinished_requests():
        core.step()


def _set_rate(worker: Any, rate: float) -> None:
    from rollspec.engine.vllm.worker import bridge

    capture = bridge(worker).learned.capture  # type: ignore[union-attr]
    capture.config = capture.config.model_copy(update={"rate": rate})
    capture.take()


def _call(llm: Any, op: str, **payload: Any) -> dict[str, Any]:
    return next(r for r in llm.collective_rpc("rollspec", args=(op, payload)) if r)


if __name__ == "__main__":
    print(run(quick="--quick" in sys.argv))
