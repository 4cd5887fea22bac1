"""The numbers that the simulation runs on: measured here, by arithmetic from a model's sizes, or assumed.

Measured ones are of this machine's disk and one of its cores, with the project's own code. Assumed ones stand for a
cluster that was not there; they are few, named, and written into the result.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS
from rollspec.errors import RollspecError

KEPT = 4
"""Versions in a store (the default of `drafter_online.versions.Versions`)."""


@dataclass(frozen=True)
class World:
    """What is assumed. Bytes per second, seconds, tokens; sizes of the target are Qwen3-8B's."""

    hidden: int = 4096
    intermediate: int = 12288
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    aux_layers: int = 3
    element_bytes: int = 2
    top_k: int = 8
    tokens_per_second: float = 2000.0  # of a replica
    response_tokens: float = 4000.0
    accepted_per_step: float = 1.5
    draft_tokens: int = 4
    publish_every: float = 60.0
    canary_drafts: int = 64
    drafts_per_second: float = 400.0  # scored by a replica with a canary
    bad_versions: float = 0.1  # share of versions that their canary rolls back
    poll: float = 1.0
    lease: float = 20.0  # `drafter_online.hub.SILENT_SECONDS`
    trainer_link: float = 12.5e9  # 100 Gbit/s
    replica_link: float = 3.1e9  # 25 Gbit/s
    store_links: float = 25e9  # of a store, over all readers
    trained_tokens: float = 20_000.0  # that the trainer learns from per second
    inbox_bytes: float = float(1 << 30)
    load: float = 0.7  # of the trainer's end, at most
    life: float = 3600.0  # mean seconds that an elastic replica stays
    crashes: float = 0.25  # share of them that leave without saying so


@dataclass(frozen=True)
class Measured:
    """What was measured: seconds per byte with the project's code, seconds that the daemon takes for a report.

    `swap_seconds` is None where `benchmarks/results/swap.json` does not say.
    """

    publish_seconds_per_byte: float
    load_seconds_per_byte: float
    unpack_seconds_per_byte: float
    pack_seconds_per_byte: float
    report_seconds: float
    swap_seconds: float | None


def world() -> World:
    """What is assumed; accepted tokens per step are those of one head that learned from two replicas' responses, where
    `python -m benchmarks.drafter --arms replicas` measured it.
    """
    try:
        found = json.loads((RESULTS / "drafter-replicas.json").read_text())["replicas"]
        (length,) = (float(row["length"]) for row in found if row["arm"] == "one head")
        return World(accepted_per_step=length - 1.0)
    except (OSError, ValueError, KeyError, TypeError):
        return World()


def head_parameters(w: World) -> int:
    """Weights in a version: an EAGLE-3 head without what belongs to the target (embedding, LM head)."""
    h, q, kv = w.hidden, w.heads * w.head_dim, w.kv_heads * w.head_dim
    attention = 2 * h * q + 2 * 2 * h * kv + q * h  # its queries, keys and values read the token and the state
    return w.aux_layers * h * h + attention + 3 * h * w.intermediate + 4 * h


def version_bytes(w: World) -> int:
    """Bytes of a version's weights."""
    return head_parameters(w) * w.element_bytes


def token_bytes(w: World) -> float:
    """Bytes of a sample per token: states, ids, mask, position; and its share of the verify steps' logits."""
    states = (w.aux_layers + 1) * w.hidden * w.element_bytes
    steps = 1.0 / (w.accepted_per_step + 1.0)  # per token
    verify = steps * (3 * 8 + w.draft_tokens * (8 + 4 + w.top_k * (8 + 4)))
    return states + 8 + 1 + 8 + verify


def sample_bytes(w: World) -> float:
    """Bytes of the sample of one response."""
    return token_bytes(w) * w.response_tokens


def derived(w: World) -> dict[str, float]:
    """What follows from the sizes."""
    return {
        "version_bytes": version_bytes(w),
        "token_bytes": token_bytes(w),
        "sample_bytes": sample_bytes(w),
        "canary_seconds": w.canary_drafts / w.drafts_per_second,
    }


def measure(quick: bool = False) -> Measured:
    """Publish, verify, pack, unpack and report, in a temporary folder; medians."""
    import torch

    from drafter_online.engines import ConnectedEngine, Engines, Hello, Status, read
    from drafter_online.release import Release
    from drafter_online.samples import Sample, Verify, VerifyStep
    from drafter_online.versions import Versions

    size, repeats = ((1 << 20), 2) if quick else ((64 << 20), 5)
    tensors = {"w": torch.randn(size // 2).bfloat16()}
    with tempfile.TemporaryDirectory(prefix="rollspec-scale-") as folder:
        store = Versions(Path(folder) / "versions", keep=KEPT)
        publish = _median(lambda: store.publish(tensors, {}, base="b", target_version=1), repeats)
        load = _median(lambda: store.load(store.latest() or 0), repeats)
        t, h = 64 if quick else 512, 4096
        none = torch.zeros(4, 0)
        steps = [VerifyStep(i, "head", [1] * 4, 2, none, none, torch.zeros(4)) for i in range(0, t, 3)]
        sample = Sample(
            input_ids=torch.arange(t),
            hidden_states=torch.randn(t, 3 * h).bfloat16(),
            verifier_last_hidden_states=torch.randn(t, h).bfloat16(),
            loss_mask=torch.ones(t, dtype=torch.bool),
            position_ids=torch.arange(t),
            prompt_key="p",
            request_id="r",
            target_version=1,
            verify=Verify.gather(steps),
        )
        blob = sample.to_bytes()
        pack = _median(sample.to_bytes, repeats)
        unpack = _median(lambda: Sample.from_bytes(blob), repeats)
        engines = Engines()
        engines.by_session["s"] = ConnectedEngine(Hello("a", "b", []))
        release = Release(store, engines, lambda: 0, 60.0)

        def report() -> None:
            engine = engines.report("s", read({"version": store.latest() or 0, "verdicts": [[1, "promoted"]]}, Status))
            if engine is not None:
                release.offer(engine)

        reporting = _median(report, 20 * repeats)
    return Measured(publish / size, load / size, unpack / len(blob), pack / len(blob), reporting, _swap_seconds())


def earlier(path: Path) -> tuple[Measured, dict[str, Any]]:
    """What an earlier result measured, and where and with what.

    Raises:
        RollspecError: it is not one.
    """
    try:
        found = json.loads(path.read_text())
        return Measured(**found["measured"]), found.get("measured_provenance") or found["provenance"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise RollspecError(f"rollspec: {path} is no result of `rollspec bench scale` ({e!r}); give one.") from e


def _median(do: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        do()
        times.append(time.perf_counter() - begin)
    return sorted(times)[len(times) // 2]


def _swap_seconds() -> float | None:
    """The median pause of a swap, of an earlier `rollspec bench swap`."""
    try:
        return float(json.loads((RESULTS / "swap.json").read_text())["swap"]["pause_ms"]["median"]) / 1e3
    except (OSError, ValueError, KeyError, TypeError):
        return None
