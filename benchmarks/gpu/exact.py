"""Exactness on this device: what an engine says with drafts is what it says without them.

In float32, rounding decides between two tokens rarely, and not never: kernels add up in another order in a batch of
another size, and a verify step is one. `control` says how often that happens without any draft. With vLLM's
batch-invariant kernels (in bfloat16) it cannot happen, and no text may differ. An engine with drafts that never
accepted one proves nothing: `accepted` says how many there were.
"""

from __future__ import annotations

from typing import Any

from benchmarks.gpu import models, storm
from benchmarks.gpu.engine import SUFFIX, call, decode, engine
from benchmarks.gpu.plan import Spec

COUPLED = {"mode": "coupled"}
QUIET = {"preset": "default", "proposal.drafters": [], **COUPLED}
"""Coupled sampling without drafts."""

Texts = list[list[int]]


def greedy(spec: Spec) -> dict[str, Any]:
    """Three epochs of the same greedy requests, the later ones drafted from the earlier; against no speculation."""
    model = models.real(spec)
    prompts, length = _work(spec, model)
    with engine(spec, model, dtype=_dtype(spec)) as llm:
        expected = decode(llm, prompts, length)["texts"]
    with engine(spec, model, rollspec=SUFFIX, dtype=_dtype(spec)) as llm:
        found = _epochs(llm, prompts, length, 0.0)
    return _compared([expected] * len(found["texts"]), found)


def coupled(spec: Spec) -> dict[str, Any]:
    """Three rounds at temperature 1, two of one policy version; against coupled sampling without drafts."""
    model = models.real(spec)
    prompts, length = _work(spec, model)
    with engine(spec, model, rollspec=QUIET, dtype=_dtype(spec)) as llm:
        expected = _epochs(llm, prompts, length, 1.0)["texts"]
    with engine(spec, model, rollspec=SUFFIX | COUPLED, dtype=_dtype(spec)) as llm:
        found = _epochs(llm, prompts, length, 1.0)
    return _compared(expected, found)


def mixed(spec: Spec) -> dict[str, Any]:
    """Requests of all kinds that come and go at any step, in a wide batch without drafts and in a narrow one with."""
    model = models.real(spec)
    prompts, _ = _work(spec, model)
    rounds, requests = (1, 12) if spec.quick else (6, 50)
    said, counts = [], {}
    for config, seats in ((QUIET, 64), (SUFFIX | COUPLED, 6)):
        with engine(spec, model, rollspec=config, dtype=_dtype(spec), max_num_seqs=seats) as llm:
            said.append([storm.run(llm, i, prompts, requests) for i in range(rounds)])
            counts = call(llm, "stats")
    return _compared(said[0], {"texts": said[1], "drafted": counts["drafted"], "accepted": counts["accepted"]})


def control(spec: Spec) -> dict[str, Any]:
    """Coupled sampling without drafts in batches of another size: what differs here is due to rounding."""
    model = models.real(spec)
    prompts, length = _work(spec, model)
    found = []
    for batch in (32, 7):
        with engine(spec, model, rollspec=QUIET, dtype=_dtype(spec)) as llm:
            found.append(_epochs(llm, prompts, length, 1.0, batch))
    return _compared(found[0]["texts"], found[1])


def _dtype(spec: Spec) -> str:
    return "bfloat16" if spec.arguments.get("invariant") else "float32"


def _work(spec: Spec, model: str) -> tuple[Texts, int]:
    count, copies, length = (4, 2, 24) if spec.quick else (24, 4, 200)
    return [p for p in models.real_prompts(model, count) for _ in range(copies)], length


def _epochs(llm: Any, prompts: Texts, length: int, temperature: float, batch: int = 32) -> dict[str, Any]:
    found: dict[str, Any] = {"texts": [], "drafted": 0, "accepted": 0}
    for version in (0, 0, 1):
        call(llm, "set_version", version=version)
        done = decode(llm, prompts, length, temperature=temperature, batch=batch)
        found["texts"].append(done["texts"])
        found["drafted"] += done["drafted"]
        found["accepted"] += done["accepted"]
    if faults := call(llm, "stats").get("faults"):
        raise RuntimeError(f"rollspec recorded faults: {faults}")
    return found


def _compared(expected: list[Any], found: dict[str, Any]) -> dict[str, Any]:
    pairs = [(a, b) for x, y in zip(expected, found["texts"], strict=True) for a, b in zip(x, y, strict=True)]
    parted = [(a, b) for a, b in pairs if a != b]
    return {
        "requests": len(pairs),
        "tokens": sum(len(a) for a, _ in pairs),
        "parted": len(parted),
        "parted_at": [_first(a, b) for a, b in parted[:20]],
        "drafted": found["drafted"],
        "accepted": found["accepted"],
    }


def _first(a: list[int], b: list[int]) -> int:
    """Index of the first token that differs."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
