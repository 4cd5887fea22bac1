"""Device time of what rollspec adds to a verify step, without an engine: needs torch.

It is checked against its plain definition first, then timed by replaying a CUDA graph of it, so that launching costs
nothing (`device_us`), and called as an engine calls it (`call_us`); once in torch's synchronisation debug mode "error".
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from benchmarks.gpu.plan import DRY_BATCHES, Spec

BATCHES = (1, 16, 64, 256)
K = 4


def measure(spec: Spec) -> dict[str, Any]:
    """Rows of (kernel, batch) with their times."""
    batches = DRY_BATCHES if spec.dry else BATCHES
    return {"rows": [{"kernel": "verify: accept", "batch": batch, **_accept(spec, batch)} for batch in batches]}


def _accept(spec: Spec, batch: int) -> dict[str, Any]:
    """Coupled verification: which drafts are what was drawn."""
    import torch

    from rollspec.engine.vllm.v2.verify import accept

    g = torch.Generator().manual_seed(batch)
    lengths = torch.randint(0, K + 1, (batch,), generator=g) + 1
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    drawn, fed = (torch.randint(0, 3, (int(starts[-1]),), generator=g) for _ in range(2))
    given: Any = [*(x.to(spec.device) for x in (drawn, fed, starts.to(torch.int32))), K]
    tokens, count = (x.tolist() for x in accept(*given))
    wrong = sum(tokens[b][: count[b]] != said for b, said in enumerate(_plain(drawn, fed, starts)))
    return {"wrong": wrong, **_time(spec, lambda: accept(*given))}


def _plain(drawn: Any, fed: Any, starts: Any) -> list[list[int]]:
    """What each request emits, by the definition: drafts while they are what was drawn, and the token after them."""
    out = []
    bounds = starts.tolist()
    for low, high in pairwise(bounds):
        said = []
        for row in range(low, high):
            said.append(int(drawn[row]))
            if row + 1 == high or int(fed[row + 1]) != said[-1]:
                break
        out.append(said)
    return out


def _time(spec: Spec, act: Callable[[], Any], seconds: float = 0.2) -> dict[str, Any]:
    import torch

    cuda = spec.device == "cuda"
    for _ in range(3):
        act()
    if cuda:
        torch.cuda.synchronize()
    calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < (0.02 if spec.quick else seconds):
        act()
        calls += 1
    host = (time.perf_counter() - start) / calls
    if cuda:
        torch.cuda.synchronize()
    found = {"call_us": 1e6 * host, "device_us": None, "synchronises": None}
    if not cuda:
        return found
    torch.cuda.set_sync_debug_mode("error")
    try:
        act()
        found["synchronises"] = False
    except RuntimeError:
        found["synchronises"] = True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if not found["synchronises"]:
        found["device_us"] = _replayed(act)
    return found


def _replayed(act: Callable[[], Any], times: int = 200) -> float:
    """Microseconds of one call on the device."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        act()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    graph.replay()
    first.record()
    for _ in range(times):
        graph.replay()
    last.record()
    torch.cuda.synchronize()
    return 1e3 * float(first.elapsed_time(last)) / times
