"""What drafting takes of a step in a real engine: device time, host time, and whether the host waits for the device.

`propose` of the running speculator is put between two CUDA events, with torch's synchronisation debug mode on and the
explicit waits (`Event`, `Stream`, device) counted. Where nothing synchronised, one more round runs in mode "error",
which ends the engine at the first synchronisation: earlier, that would only cost the other numbers.
"""

from __future__ import annotations

import random
import statistics
import threading
from typing import Any

from benchmarks.gpu import models
from benchmarks.gpu.engine import SUFFIX, decode, engine, needs_v2
from benchmarks.gpu.plan import Spec

BATCHES = (1, 64, 256)


def measure(spec: Spec) -> dict[str, Any]:
    """By batch size: microseconds of `propose` on the device and on the host, its share of a step, synchronisations."""
    shape, batches = ("tiny", (1, 2)) if spec.dry else ("qwen3-1.7b", BATCHES)
    model = str(models.target(spec.folder, shape, "float32" if spec.dry else "bfloat16"))
    rows = []
    with engine(
        spec, model, rollspec=SUFFIX, load_format="dummy", skip_tokenizer_init=True, max_num_seqs=max(batches)
    ) as llm:
        needs_v2(llm)
        llm.collective_rpc(watch, args=(spec.device == "cuda", "warn"))
        for batch in batches:
            rows.append({"batch": batch, **_row(llm, batch, 8 if spec.dry else 160)})
        strict = None
        if spec.device == "cuda" and not any(row["synchronisations"] for row in rows):
            llm.collective_rpc(watch, args=(True, "error"))
            decode(llm, repeating(batches[-1], 64), 32)
            strict = True
    return {"shape": shape, "batches": rows, "error_mode_passed": strict}


def _row(llm: Any, batch: int, length: int) -> dict[str, Any]:
    prompts = repeating(batch, 64)
    decode(llm, prompts, length)  # compiles, and fills the history
    llm.collective_rpc(take)
    done = decode(llm, prompts, length)
    found = [r for r in llm.collective_rpc(take)[0] if r["requests"] == batch]
    step_us = 1e6 * done["seconds"] / done["steps"]
    host = statistics.median(r["host_us"] for r in found)
    device = [r["device_us"] for r in found if r["device_us"] is not None]
    return {
        "calls": len(found),
        "device_us": statistics.median(device) if device else None,
        "device_us_p99": sorted(device)[int(0.99 * len(device))] if device else None,
        "host_us": host,
        "step_us": step_us,
        "host_share": host / step_us,
        "synchronisations": sum(r["synchronisations"] for r in found),
        "where": sorted({w for r in found for w in r["where"]})[:10],
        "drafted": done["drafted"],
    }


def repeating(count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Prompts that repeat themselves, so that lookup drafters find matches."""
    rng = random.Random(seed)
    blocks = [[rng.randrange(5, 500) for _ in range(length // 4)] for _ in range(count)]
    return [block * 4 for block in blocks]


# ---- in the worker --------------------------------------------------------------------------------------------------


def watch(worker: Any, cuda: bool, mode: str) -> None:
    """Time every `propose` of the speculator from now on; `take` gives the rows."""
    import time

    import torch

    speculator = worker.model_runner.speculator
    inner = getattr(speculator, "_rollspec_watched", speculator.propose)
    speculator._rollspec_watched = inner
    rows: list[dict[str, Any]] = []
    worker._rollspec_propose = rows

    def propose(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dummy_run"):  # all by keyword, the batch as well
            return inner(*args, **kwargs)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if cuda else []  # type: ignore[no-untyped-call]
        with Synchronisations(mode if cuda else None) as seen:
            if events:
                events[0].record()
            start = time.perf_counter()
            out = inner(*args, **kwargs)
            host = time.perf_counter() - start
            if events:
                events[1].record()
        rows.append(
            {"requests": args[0].num_reqs, "host_us": 1e6 * host, "events": events, "synchronisations": seen.count,
             "where": seen.where}
        )  # fmt: skip
        return out

    speculator.propose = propose


def take(worker: Any) -> list[dict[str, Any]]:
    """The calls since the last time."""
    import torch

    rows = list(worker._rollspec_propose)
    worker._rollspec_propose.clear()
    if any(r["events"] for r in rows):
        torch.cuda.synchronize()
    for row in rows:
        events = row.pop("events")
        row["device_us"] = 1e3 * events[0].elapsed_time(events[1]) if events else None
    return rows


class Synchronisations:
    """Counts what makes the host wait for the device inside a block. `mode`: torch's, "warn" or "error"; None: not."""

    def __init__(self, mode: str | None) -> None:
        self.mode = mode
        self.count = 0
        self.where: list[str] = []

    def __enter__(self) -> Synchronisations:
        if self.mode is None:
            return self
        import warnings

        import torch

        self._thread = threading.get_ident()
        self._before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode(self.mode)
        self._caught = warnings.catch_warnings(record=True)
        self._warnings = self._caught.__enter__()
        warnings.simplefilter("always")
        # The debug mode does not see waits that are asked for by name.
        self._waits = [
            (torch.cuda.Event, "synchronize"), (torch.cuda.Stream, "synchronize"), (torch.cuda, "synchronize")
        ]  # fmt: skip
        self._originals = [getattr(owner, name) for owner, name in self._waits]
        for (owner, name), original in zip(self._waits, self._originals, strict=True):
            setattr(owner, name, self._counting(original, f"{getattr(owner, '__name__', owner)}.{name}"))
        return self

    def _counting(self, original: Any, name: str) -> Any:
        def wait(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:  # others may wait: the step does not
                return original(*args, **kwargs)
            self.count += 1
            self.where.append(name)
            if self.mode == "error":
                raise RuntimeError(f"{name} waits for the device")
            return original(*args, **kwargs)

        return wait

    def __exit__(self, *error: Any) -> None:
        if self.mode is None:
            return
        import torch

        for (owner, name), original in zip(self._waits, self._originals, strict=True):
            setattr(owner, name, original)
        self._caught.__exit__(*error)
        torch.cuda.set_sync_debug_mode(self._before)
        for warning in self._warnings:
            if "synchroniz" in str(warning.message):
                self.count += 1
                self.where.append(f"{warning.filename.rpartition('/')[2]}:{warning.lineno}")
