"""Where each part of the design binds, by arithmetic on the same numbers; the table and the sentences."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from benchmarks.scale.costs import Measured, World, version_bytes
from benchmarks.scale.feedback import rate_for, server_seconds


def limits(w: World, m: Measured) -> dict[str, float]:
    """Replicas at which something gives out.

    star, store: a version takes as long to spread as until the next one. look: the daemon's one core does nothing but
    take reports. record_all: the trainer's end is full if every response is recorded. one_in_100: fewer than one
    response in a hundred can be recorded.
    """
    size = version_bytes(w)
    room = w.load * w.response_tokens / server_seconds(w, m)  # tokens per second
    used = min(room, w.trained_tokens)
    return {
        "star": w.publish_every * min(w.trainer_link, w.replica_link) / size,
        "store": w.publish_every * (w.store_links // w.replica_link) * w.replica_link / size,
        "look": w.poll / m.report_seconds,
        "record_all": room / w.tokens_per_second,
        "one_in_100": 100 * used / w.tokens_per_second,
        "rate_at_1024": rate_for(1024, w, m),
    }


def sentences(result: dict[str, Any]) -> list[str]:
    """Where it stops, in words."""
    x, w = result["limits"], result["assumed"]
    return [
        f"One sender keeps up with a version every {w['publish_every']:.0f} s up to {x['star']:.0f} replicas, a shared "
        f"store up to {x['store']:.0f}; passed on from replica to replica there is no such limit.",
        f"Reports every {w['poll']:g} s take a whole core of the daemon at {x['look']:.0f} replicas.",
        f"All responses can be recorded up to {x['record_all']:.1f} replicas; at 1,024 the trainer's budget allows "
        f"{100 * x['rate_at_1024']:.2f} %.",
    ]


def table(result: dict[str, Any]) -> Table:
    """One row per number of replicas."""
    out = Table(title="versions, canaries and feedback over replicas (simulated)", title_justify="left")
    for name in ("replicas", "spread: star", "store", "tree", "age: star", "store", "tree", "promoted: star",
                 "tree", "joining", "recorded", "wait p99", "dropped if all"):  # fmt: skip
        out.add_column(name, justify="right")
    for r in result["replicas"]:
        f = r["fan_out"]
        out.add_row(
            f"{r['replicas']:,}",
            *(f"{f[k]['fan_out']:.1f} s" for k in ("star", "store", "tree")),
            *(f"{f[k]['age']:.1f} s" for k in ("star", "store", "tree")),
            *(f"{100 * f[k]['promoted'] / f[k]['versions']:.0f} %" for k in ("star", "tree")),
            f"{r['elastic']['joining']:.1f} s",
            f"{100 * r['feedback_budget']['rate']:.2f} %",
            f"{r['feedback_budget']['wait_p99']:.2f} s",
            f"{100 * r['feedback_all']['dropped']:.0f} %",
        )
    return out
