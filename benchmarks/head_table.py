"""What `rollspec bench head` found, in numbers and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from benchmarks.harness import ratio

Rounds = Sequence[Sequence[dict[str, Any]]]
"""Of an arm: rounds of epochs."""


def summarise(runs: Mapping[str, Rounds], names: Sequence[str]) -> dict[str, Any]:
    """Speed-ups per token over none and over suffix drafts by the clock and by CPU time, acceptance, and what had been
    predicted of it; by epoch (`names`) and arm.
    """
    out: dict[str, Any] = {}
    for at, workload in enumerate(names):
        out[workload] = {}
        for name, rounds in runs.items():
            every = [one[at] for one in rounds]
            tokens, accepted, drafted = (sum(e[k] for e in every) for k in ("tokens", "accepted", "drafted"))
            out[workload][name] = {
                **{
                    f"speedup_over_{other}{by}": asdict(
                        ratio([each(one[at], key) for one in runs[other]], [each(e, key) for e in every])
                    )
                    for other in ("none", "suffix")
                    for by, key in (("", "seconds"), ("_cpu", "cpu_seconds"))
                },
                "tokens_per_second": tokens / sum(e["seconds"] for e in every),
                "trainer_cpu_seconds": sum(e.get("trainer_cpu_seconds") or 0.0 for e in every),
                "acceptance_length": tokens / (tokens - accepted),
                "acceptance_rate": accepted / drafted if drafted else None,
                "by_source": _added(every, "by_source"),
                "calibration": calibration(every),
                "pass_over_step": _pass(every),
            }
    return out


def each(epoch: Mapping[str, Any], key: str) -> float:
    """`key` of an epoch per token: responses end by themselves, so arms emit other numbers of them."""
    return float(epoch[key] / epoch["tokens"])


def calibration(epochs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Accepted draft tokens that were predicted, over those that happened; of all drafters, and of each."""
    counts = _added(epochs, "by_source")
    by: dict[str, float] = {}
    for e in epochs:
        for source, n in (e.get("predicted_by") or {}).items():
            by[source] = by.get(source, 0.0) + n
    rows = {source: (by.get(source, 0.0), *row[1:]) for source, row in counts.items()}
    rows["all"] = (sum(by.values()), *(sum(row[i] for row in counts.values()) for i in (1, 2)))
    return {
        source: {"predicted": p, "drafted": drafted, "accepted": accepted, "ratio": p / accepted if accepted else None}
        for source, (p, drafted, accepted) in rows.items()
    }


def _added(epochs: Sequence[dict[str, Any]], name: str) -> dict[str, list[float]]:
    out: dict[str, list[float]] = {}
    for e in epochs:
        for source, row in (e.get(name) or {}).items():
            out[source] = [a + b for a, b in zip(out.get(source, [0.0] * len(row)), row, strict=True)]
    return out


def _pass(epochs: Sequence[dict[str, Any]]) -> float | None:
    """Seconds of a pass of the head over those of an engine step without its passes; None where none was run."""
    passes, seconds = (sum(e.get(k) or 0 for e in epochs) for k in ("passes", "pass_seconds"))
    steps, every = (sum(e.get(k) or 0 for e in epochs) for k in ("engine_steps", "engine_seconds"))
    return float(seconds / passes / ((every - seconds) / steps)) if passes and steps else None


def table(batch: int, result: Mapping[str, Any]) -> Table:
    """One batch size for people."""
    t = Table(title=f"batch {batch}")
    columns = ("prompts", "arm", "tok/s", "over\nnone", "by CPU", "over\nmemory", "tok\n/step", "acc.",
               "pred.\n/acc.")  # fmt: skip
    for column in columns:
        t.add_column(column, justify="left" if column in ("prompts", "arm") else "right")
    for workload, arms in result.items():
        for name, a in arms.items():
            shown = [
                f"{r['median']:.2f}x\n{r['low']:.2f}-\n{r['high']:.2f}"
                for r in (a["speedup_over_none"], a["speedup_over_none_cpu"], a["speedup_over_suffix"])
            ]
            rate, off = a["acceptance_rate"], a["calibration"]["all"]["ratio"]
            t.add_row(
                workload,
                name,
                f"{a['tokens_per_second']:.0f}",
                *shown,
                f"{a['acceptance_length']:.2f}",
                f"{100 * rate:.0f} %" if rate is not None else "-",
                f"{off:.2f}" if off is not None else "-",
            )
    return t
