"""What swaps of drafter weights and the capture of training samples cost a running engine.

Swap: requests decode without a pause while weights that alternate between two versions are swapped in again and again;
the pause of each is set against the median decode step without one, both timed inside the worker. Identity: the same
requests in float32, greedily, without speculation and with a swap every few steps: what was lost, what changed.
Capture: rounds with it on and off, paired and alternating in one engine.

    python -m benchmarks.swap [--quick] [--parts swap capture identity]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.drift import CACHE
from benchmarks.harness import RESULTS, pin, provenance, quantile, ratio, save
from examples.demo.job import JobSettings, prepare_assets
from rollspec.machine import native_dtype

MAX_LEN = 512
REQUESTS, LENGTH = 8, 256
EVERY = 12
"""Steps between two swaps of the identity check, as seen by the front end."""


PARTS = ("swap", "capture", "identity")


def run(quick: bool = False, out: Path | None = None, parts: tuple[str, ...] = PARTS) -> Path:
    """Print the numbers and save them, part by part: parts that are not run now stay as they were in the file."""
    pin()
    os.environ.update(VLLM_ALLOW_INSECURE_SERIALIZATION="1", VLLM_LOGGING_LEVEL="ERROR")
    console = Console(stderr=True)
    model = prepare_assets(JobSettings(), CACHE / "grpo_arithmetic").model
    target = out or RESULTS / "swap.json"
    result: dict[str, Any] = json.loads(target.read_text()) if target.is_file() and not quick else {}

    def keep(part: str, found: dict[str, Any], began: dict[str, Any]) -> None:
        result[part] = {**found, "provenance": began, "load_after": os.getloadavg()}
        save("swap", result, target)

    if {"swap", "capture"} & set(parts):
        llm = engine(model, native_dtype(), speculate=True)
        try:
            if "swap" in parts:
                began = provenance()
                s = swaps(llm, 6 if quick else 100)
                keep("swap", s, began)
                console.print(
                    f"swap: median pause {s['pause_ms']['median']:.2f} ms, p99 {s['pause_ms']['p99']:.2f} ms, longest "
                    f"{s['pause_ms']['longest']:.2f} ms; a decode step takes {s['step_ms']['median']:.2f} ms "
                    f"({s['swap_step_ms']:.2f} ms one with a swap in it); {s['swaps']} swaps"
                )
            if "capture" in parts:
                began = provenance()
                c = captures(llm, quick)
                keep("capture", c, began)
                for batch, row in c.items():
                    console.print(
                        f"capture at batch {batch}: time with / without {row['ratio'].median:.4f} "
                        f"[{row['ratio'].low:.4f}, {row['ratio'].high:.4f}]; share of the step by the clock inside "
                        f"{row['share']:.4f}"
                    )
        finally:
            llm.llm_engine.engine_core.shutdown()
    if "identity" in parts:
        began = provenance()
        i = identity(model, 12 if quick else 48)
        keep("identity", i, began)
        console.print(
            f"identity: {i['requests']} requests, {i['swaps']} swaps while they ran: {i['lost']} lost, "
            f"{i['changed']} changed"
        )
    return target


def engine(model: str, dtype: str, speculate: bool, everything: bool = False, **options: Any) -> Any:
    """`everything`: all that is drafted is verified, as much as there can be to disturb; else what pays, so that a
    decode step is as short as it comes. `options` are of `vllm.LLM`.
    """
    from vllm import LLM

    rollspec = {
        "proposal.drafters": ["suffix", "eagle3"],
        "drafter.dir": str(CACHE),
        "proposal.k_max": 4,
        "proposal.budget.rule": "fixed" if everything else "goodput",
        "tuning.strategy": "static",
        "tuning.guard.enabled": False,
        "drafter.mode": "capture",
        "drafter.capture.share": 1.0,
    }
    return LLM(
        model=model,
        dtype=dtype,
        max_model_len=MAX_LEN,
        max_num_seqs=64,
        enable_prefix_caching=False,
        disable_log_stats=False,
        additional_config={"rollspec": rollspec} if speculate else {},
        **{"enforce_eager": True} | options,
    )


class Swaps:
    """Alternates an engine's drafter between what it was started with and a copy that differs by 2 %."""

    def __init__(self, llm: Any) -> None:
        from safetensors.torch import load_file, save_file

        self.llm = llm
        info = _call(llm, "info")["drafter"]
        head, other = Path(info["started_with"]), CACHE / "heads" / "other"
        other.mkdir(parents=True, exist_ok=True)
        save_file({n: t * 0.98 for n, t in load_file(head / "model.safetensors").items()}, other / "model.safetensors")
        self.folders = (head, other)
        self.version = int(info["version"])

    def begin(self) -> None:
        """Have the other weights staged; they are swapped in at a step to come."""
        self.version += 1
        folder = str(self.folders[self.version % 2])
        answer = _call(self.llm, "swap", dir=folder, version=self.version, canary=False)
        if "error" in answer:
            raise RuntimeError(answer["error"])

    def done(self) -> dict[str, Any] | None:
        """What the last one took; None while it is on its way."""
        info = _call(self.llm, "info")["drafter"]
        return dict(info["last"]) if info["version"] == self.version and info["state"] == "settled" else None


def swaps(llm: Any, count: int) -> dict[str, Any]:
    """Pauses of `count` swaps between the steps of a running batch, and steps without one."""
    core = llm.llm_engine
    weights = Swaps(llm)
    pauses: list[float] = []
    stages: list[float] = []
    fed = 0

    def steps(n: int) -> None:
        nonlocal fed
        for _ in range(n):
            while core.get_num_unfinished_requests() < REQUESTS:
                _add(core, f"swap-{fed}")
                fed += 1
            core.step()

    steps(32)  # the first ones compile
    llm.collective_rpc(_watch_steps)
    while len(pauses) < count:
        weights.begin()
        steps(6)
        while (last := weights.done()) is None:
            steps(1)
        pauses.append(last["pause_ms"])
        stages.append(last["stage_ms"])
    timed = next(t for t in llm.collective_rpc(_steps) if t)
    _drain(core)
    plain = sorted(1e3 * seconds for seconds, swapped in timed if not swapped)
    with_swap = [1e3 * seconds for seconds, swapped in timed if swapped]
    ordered = sorted(pauses)
    return {
        "swaps": len(pauses),
        "pause_ms": {
            "median": statistics.median(pauses),
            "p99": quantile(ordered, 0.99),
            "longest": ordered[-1],
        },
        "pause_steps": {
            "median": statistics.median(pauses) / statistics.median(plain),
            "p99": quantile(ordered, 0.99) / statistics.median(plain),
        },
        "stage_ms": statistics.median(stages),
        "step_ms": {"median": statistics.median(plain), "p90": quantile(plain, 0.9), "n": len(plain)},
        "swap_step_ms": statistics.median(with_swap) if with_swap else None,
    }


def identity(model: str, requests: int) -> dict[str, Any]:
    """Greedy outputs in float32 without speculation, and with a swap every few steps while requests run."""
    plain = engine(model, "float32", speculate=False)
    try:
        expected = _answers(plain, requests)
    finally:
        plain.llm_engine.engine_core.shutdown()
    llm = engine(model, "float32", speculate=True, everything=True)
    try:
        weights = Swaps(llm)
        count = 0

        def swap(step: int) -> None:
            nonlocal count
            if step % EVERY == 0 and weights.done() is not None:
                weights.begin()
                count += 1

        found = _answers(llm, requests, swap)
        stats = _call(llm, "stats")
    finally:
        llm.llm_engine.engine_core.shutdown()
    if stats["faults"]:
        raise RuntimeError(f"faults while swapping: {stats['faults']}")
    lost = [i for i in range(requests) if i not in found]
    changed = [i for i in expected if i in found and found[i] != expected[i]]
    return {
        "requests": requests,
        "tokens": sum(map(len, found.values())),
        "swaps": count,
        "lost": len(lost),
        "changed": len(changed),
        "drafted": stats["drafted"],
        "accepted": stats["accepted"],
    }


def _answers(llm: Any, requests: int, between: Any = None) -> dict[int, list[int]]:
    """What each request says, of staggered lengths; `between` is called before every step with its number."""
    core = llm.llm_engine
    for i in range(requests):
        _add(core, f"{i}-identity", 96 + 29 * (i % 6))
    out: dict[int, list[int]] = {}
    step = 0
    while core.has_unfinished_requests():
        step += 1
        if between is not None:
            between(step)
        for o in core.step():
            if o.finished:
                out[int(o.request_id.split("-")[0])] = list(o.outputs[0].token_ids)
    return out


def captures(llm: Any, quick: bool) -> dict[str, Any]:
    """Time with capture over time without it, per batch size; pairs in alternating order."""
    out: dict[str, Any] = {}
    for batch in (1, 8, 32):
        on: list[float] = []
        off: list[float] = []
        share: list[float] = []
        for r in range(2 if quick else 12):
            for enabled in (True, False) if r % 2 else (False, True):
                llm.collective_rpc(_record, args=(enabled,))
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


def _watch_steps(worker: Any) -> None:
    """Time every step inside the worker, from one forward pass's beginning to the next one's."""
    from rollspec.engine.vllm.v2.install import bridge

    drafter = bridge(worker)
    swapper = drafter.head.swapper  # type: ignore[union-attr]
    before_step = drafter.before_step  # type: ignore[union-attr]
    rows: list[tuple[float, bool]] = []
    last: list[Any] = [None, False]

    def watched(output: Any) -> None:
        now, version = time.perf_counter(), swapper.version
        if last[0] is not None:
            rows.append((now - last[0], last[1]))
        before_step(output)
        prompts = output.scheduled_new_reqs or not output.total_num_scheduled_tokens
        last[:] = [None if prompts else now, swapper.version != version]

    drafter.before_step = watched  # type: ignore[union-attr, method-assign]
    worker._rollspec_steps = rows


def _steps(worker: Any) -> list[tuple[float, bool]]:
    return list(worker._rollspec_steps)


def _record(worker: Any, on: bool) -> None:
    from rollspec.engine.vllm.v2.install import bridge

    capture = bridge(worker).head.capture  # type: ignore[union-attr]
    capture.paused = not on
    capture.take()


def _call(llm: Any, op: str, **payload: Any) -> dict[str, Any]:
    return next(r for r in llm.collective_rpc("rollspec", args=(op, payload)) if r)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    args = parser.parse_args()
    print(run(args.quick, args.out, tuple(args.parts)))
