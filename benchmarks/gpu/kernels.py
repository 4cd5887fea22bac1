"""Device time of what rollspec adds to a verify step, without an engine: needs torch, and Triton for the noise.

Each is checked against its plain definition first, then timed by replaying a CUDA graph of it, so that launching costs
nothing (`device_us`), and called as an engine calls it (`call_us`); once in torch's synchronisation debug mode "error".
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from benchmarks.gpu.plan import DRY_BATCHES, NotHereError, Spec

BATCHES = (1, 16, 64, 256)
K = 4
SIBLINGS, LENGTH = 24, 1024
"""Texts of a slice that drafts are looked up in, and their tokens: a prompt group of 8 over three epochs."""


def measure(spec: Spec) -> dict[str, Any]:
    """Rows of (kernel, batch) with their times; what is not in this revision is named."""
    rows: list[dict[str, Any]] = []
    left: dict[str, str] = {}
    for batch in DRY_BATCHES if spec.dry else BATCHES:
        rows.append({"kernel": "verify: accept", "batch": batch, **_accept(spec, batch)})
        try:
            rows.append({"kernel": "lookup: scan", "batch": batch, **_lookup(spec, batch)})
        except (ImportError, NotHereError) as e:
            left["lookup: scan"] = str(e)
    return {"rows": rows, "left_out": left}


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


def _lookup(spec: Spec, batch: int) -> dict[str, Any]:
    """Longest-suffix lookup in one slice per request, of siblings that differ in 5 % of their tokens."""
    import numpy as np
    import torch

    if spec.device == "cpu":
        raise NotHereError("its kernels run on a GPU")
    from benchmarks.gpu.lookup_reference import reference
    from benchmarks.gpu.lookup_triton import lookup
    from rollspec.proposal.lookup import DEPTH, SEPARATOR

    rng = np.random.default_rng(batch)
    said = rng.integers(0, 1000, (batch, 1, LENGTH))
    texts = np.where(
        rng.random((batch, SIBLINGS, LENGTH)) < 0.05, rng.integers(0, 1000, (batch, SIBLINGS, LENGTH)), said
    )
    ends_with = np.full((batch, SIBLINGS, 1), SEPARATOR)
    corpus = np.concatenate([texts, ends_with], 2).reshape(-1).astype(np.int32)
    size = SIBLINGS * (LENGTH + 1)
    starts = np.arange(batch, dtype=np.int64) * size
    at = rng.integers(DEPTH, LENGTH - K, batch)
    contexts = np.stack([said[b, 0, i - DEPTH : i] for b, i in enumerate(at)]).astype(np.int32)
    rooms = np.full(batch, K, np.int32)
    few = min(batch, 4)  # the plain definition is slow
    expected = reference(corpus, starts[:few], starts[:few] + size, contexts[:few], rooms[:few], 2.0, 0.1)
    on = [torch.from_numpy(x).to(spec.device) for x in (corpus, starts, starts + size, contexts, rooms)]
    given: Any = [*on, 2.0, 0.1, K, size]
    found = lookup(*given)
    counts = found.counts[:few].tolist()
    wrong = sum(
        counts[b] != n or found.tokens[b, :n].tolist() != expected.tokens[b, :n].tolist()
        for b, n in enumerate(expected.counts[:few].tolist())
    )
    return {"wrong": wrong, "slice": size, "drafted": int(found.counts.sum())} | _time(spec, lambda: lookup(*given))


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
