"""An engine starts with rollspec: in the second runner, with full CUDA graphs captured, scheduling ahead of itself."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.gpu import models
from benchmarks.gpu.engine import SUFFIX, call, count_graphs, decode, engine, facts, graphs_replayed
from benchmarks.gpu.plan import Spec


def measure(spec: Spec) -> dict[str, Any]:
    """What the engine has, whether that is all of it, and how long it took to start."""
    shape = "tiny" if spec.dry else "qwen3-1.7b"
    model = str(models.target(spec.folder, shape, "float32" if spec.dry else "bfloat16"))
    began = time.monotonic()
    with engine(spec, model, rollspec=SUFFIX, load_format="dummy", skip_tokenizer_init=True) as llm:
        seconds = time.monotonic() - began
        found = facts(llm)
        llm.collective_rpc(count_graphs)
        # One prompt that repeats itself and one that does not: drafts of different lengths.
        said = decode(llm, [[5, 6, 7, 8] * 4, [*range(10, 26)]], 48)
        replayed = llm.collective_rpc(graphs_replayed)[0]
        info = call(llm, "info")
    full = any("FULL" in kind for kind in found["graphs"]["captured"])
    return {
        **found,
        "full_graphs": full,
        "state": info.get("state"),
        "reason": info.get("reason"),
        "start_seconds": seconds,
        "decoded": said["tokens"],
        "drafted": said["drafted"],
        "graphs_replayed": replayed,
        "holds": found["v2_runner"]
        and full
        and found["asynchronous"]
        and info.get("state") != "off"
        and replayed.get("FULL", 0) > 0.9 * sum(replayed.values()),
    }
