"""What the rollout benchmark's runs say: paired ratios, acceptance, the oracle, the limit; as data and as a table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from benchmarks.harness import ratio

Runs = dict[str, list[list[dict[str, Any]]]]
"""Arm -> rounds -> epochs -> what the engine measured."""


def summarise(runs: Runs) -> dict[str, Any]:
    """Seconds, acceptance and paired ratios of one batch size. From the second epoch on, drafters have a history.

    Ratios are speed-ups: above 1 means that the arm took less time than what it is compared with.
    """
    later = {name: [e["seconds"] for one in rounds for e in one[1:]] for name, rounds in runs.items()}
    first = {name: [one[0]["seconds"] for one in rounds] for name, rounds in runs.items()}
    every = {name: [sum(e["seconds"] for e in one) for one in rounds] for name, rounds in runs.items()}
    lookup = next(name for name in runs if name.startswith("ngram"))  # the best of vLLM's own
    # The best fixed arm in hindsight, among the methods rollspec is compared with; it cannot switch within a rollout.
    oracle = min((name for name in runs if name != "rollspec"), key=lambda name: sum(later[name]))
    return {
        "arms": {
            name: {
                "seconds_per_epoch": statistics.mean(later[name]),
                "speedup_later_epochs": asdict(ratio(later["none"], later[name])),
                "speedup_first_epoch": asdict(ratio(first["none"], first[name])),
                "speedup_all_epochs": asdict(ratio(every["none"], every[name])),
                **_counted([e for one in rounds for e in one[1:]]),
            }
            for name, rounds in runs.items()
        },
        "rollspec_over_ngram": asdict(ratio(later[lookup], later["rollspec"])),
        "rollspec_over_ngram_first_epoch": asdict(ratio(first[lookup], first["rollspec"])),
        "oracle": {"arm": oracle, "speedup": asdict(ratio(later["none"], later[oracle]))},
        "rollspec_over_oracle": asdict(ratio(later[oracle], later["rollspec"])),
    }


def _counted(epochs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    tokens, steps = sum(e["tokens"] for e in epochs), sum(e["steps"] for e in epochs)
    accepted, drafted = sum(e["accepted"] for e in epochs), sum(e["drafted"] for e in epochs)
    shares = [e["propose_share"] for e in epochs if e.get("propose_share") is not None]
    return {
        "acceptance_rate": accepted / drafted if drafted else None,
        "acceptance_length": tokens / (tokens - accepted) if tokens > accepted else None,
        "steps_per_epoch": steps / len(epochs),
        "ms_per_step": 1e3 * sum(e["seconds"] for e in epochs) / steps,
        "drafted_per_token": drafted / tokens,
        "after_end_share": sum(e["after_end"] for e in epochs) / tokens,
        "propose_share": statistics.mean(shares) if shares else None,
    }


def table(batch: int, result: dict[str, Any]) -> Table:
    """One batch size for people."""
    t = Table(title=f"batch {batch}: generation, epochs from the second on")
    for column in ("arm", "s per epoch", "speed-up", "95 % interval", "first epoch", "accepted + 1", "rate", "ms/step"):
        t.add_column(column, justify="left" if column == "arm" else "right")
    for name, a in result["arms"].items():
        s, f = a["speedup_later_epochs"], a["speedup_first_epoch"]
        t.add_row(
            name,
            f"{a['seconds_per_epoch']:.2f}",
            f"{s['median']:.2f}x",
            f"{s['low']:.2f}-{s['high']:.2f}",
            f"{f['median']:.2f}x",
            f"{a['acceptance_length']:.2f}" if a["acceptance_length"] else "-",
            f"{a['acceptance_rate']:.2f}" if a["acceptance_rate"] is not None else "-",
            f"{a['ms_per_step']:.1f}",
        )
    if limit := result.get("perfect_drafter"):
        reach = result["arms"]["none"]["seconds_per_epoch"] / limit["seconds"]
        t.add_row(f"limit (perfect K={limit['k']})", f"{limit['seconds']:.2f}", f"{reach:.2f}x", *"-----", style="dim")
    r, o = result["rollspec_over_ngram"], result["rollspec_over_oracle"]
    t.caption = (
        f"rollspec against best ngram {r['median']:.2f}x ({r['low']:.2f}-{r['high']:.2f}), against the oracle "
        f"({result['oracle']['arm']}) {o['median']:.2f}x ({o['low']:.2f}-{o['high']:.2f})"
    )
    if full := result.get("full_batch"):
        share = full.get("propose_share")
        t.caption += f"; drafting {100 * share:.1f} % of a step at a full batch" if share is not None else ""
    return t
