"""What the tuner benchmark's runs say: paired ratios, the goals, the cost model's own limits; as data and a table."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.harness import ratio, verdict
from rollspec.telemetry.summary import REGRETS_PART

Runs = dict[str, list[list[dict[str, Any]]]]
"""Arm -> rounds -> epochs -> what the engine measured."""

ORACLE_GOAL, FIXED_GOAL, STEADY_GOAL = 1.05, 1.05, 1.03


def oracle_table(epochs: Sequence[dict[str, Any]]) -> dict[int, int]:
    """Draft length per batch size (as `tuning.options.table` has it) with the most tokens per modelled second over
    `epochs`; the ledger says what every arm would have emitted in every step.
    """
    emitted: dict[int, Any] = defaultdict(float)
    seconds: dict[int, Any] = defaultdict(float)
    ks: list[int] = []
    for epoch in epochs:
        # "fixed/none", "fixed/suffix:1", ... in the order of the arms
        arms = [a for a in epoch.get("modelled") or () if a.startswith("fixed/")]
        ks = ks or [0 if a == "fixed/none" else int(a.rsplit(":", 1)[1]) for a in arms]
        for bucket, (tokens, time) in (epoch.get("buckets") or {}).items():
            emitted[int(bucket) % 16] += np.array(tokens)
            seconds[int(bucket) % 16] += np.array(time)
    return {1 << b: ks[int((emitted[b] / seconds[b]).argmax())] for b in sorted(emitted)}


def summarise(runs: Runs) -> dict[str, Any]:
    """Speed-ups over none (above 1: faster), hedge against the best fixed draft length and against the oracle.

    Pairs are epochs of one round, an epoch being one rollout; `_runs` are pairs of whole runs. Epochs from the second
    on have a history and are also compared by themselves.
    """
    whole = {name: [sum(e["seconds"] for e in one) for one in rounds] for name, rounds in runs.items()}
    later = {name: [sum(e["seconds"] for e in one[1:]) for one in rounds] for name, rounds in runs.items()}
    each = {name: [e["seconds"] for one in rounds for e in one] for name, rounds in runs.items()}
    out: dict[str, Any] = {
        "arms": {
            name: {
                "seconds": statistics.mean(whole[name]),
                "speedup": asdict(ratio(each["none"], each[name])),
                "speedup_runs": asdict(ratio(whole["none"], whole[name])),
                "speedup_later_epochs": asdict(ratio(later["none"], later[name])),
                **_counted([e for one in rounds for e in one]),
            }
            for name, rounds in runs.items()
        }
    }
    fixed = [name for name in runs if name.startswith("K=")]
    if "hedge" in runs and fixed:
        best = min(fixed, key=lambda name: sum(whole[name]))
        found = ratio(each[best], each["hedge"])
        out["best_fixed"] = {
            "arm": best,
            "fixed_over_hedge": asdict(found),
            "fixed_over_hedge_runs": asdict(ratio(whole[best], whole["hedge"])),
            "goal": FIXED_GOAL,
            "verdict": verdict(found, FIXED_GOAL, most=False),
        }
    if "hedge" in runs and "oracle" in runs:
        found = ratio(each["hedge"], each["oracle"])
        out["oracle"] = {
            "hedge_over_oracle": asdict(found),
            "hedge_over_oracle_runs": asdict(ratio(whole["hedge"], whole["oracle"])),
            "goal": ORACLE_GOAL,
            "verdict": verdict(found, ORACLE_GOAL),
        }
    return out


def distance(runs: Runs) -> dict[str, Any]:
    """Of a batch that stays: the time of hedge over that of the arm which took least of all, with or without drafts.
    Pairs are epochs; `later`: from the second one on, which has a history and knows what steps cost.
    """
    each = {name: [e["seconds"] for one in rounds for e in one] for name, rounds in runs.items()}
    later = {name: [e["seconds"] for one in rounds for e in one[1:]] for name, rounds in runs.items()}
    best = min((name for name in runs if name != "hedge"), key=lambda name: sum(each[name]))
    found, after = ratio(each["hedge"], each[best]), ratio(later["hedge"], later[best])
    return {
        "best": best,
        "hedge_over_best": asdict(found),
        "hedge_over_best_later": asdict(after),
        "goal": STEADY_GOAL,
        "verdict": verdict(found, STEADY_GOAL),
        "verdict_later": verdict(after, STEADY_GOAL),
        "over_none": {name: asdict(ratio(each["none"], seconds)) for name, seconds in each.items() if name != "none"},
    }


def distances(result: dict[str, Any]) -> Table:
    """By batch size, for people."""
    t = Table(title="a batch that stays: hedge's time over that of the best arm in hindsight, measured")
    for column in ("batch", "best arm", "hedge / best", "95 % interval", "later epochs", "95 % interval", "goal"):
        t.add_column(column, justify="left" if column == "best arm" else "right")
    for batch, found in result["batches"].items():
        both = (found["hedge_over_best"], found["hedge_over_best_later"])
        cells = [cell for r in both for cell in (f"{r['median']:.3f}", f"{r['low']:.3f}-{r['high']:.3f}")]
        t.add_row(batch, found["best"], *cells, f"{found['goal']:g}: {found['verdict']}, {found['verdict_later']}")
    return t


def _counted(epochs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums over epochs of what rollspec counted, and the cost model's view of what other settings would have taken."""

    def total(get: Callable[[dict[str, Any]], Any]) -> float:
        return float(sum(get(e) or 0 for e in epochs))

    seconds, tokens = total(lambda e: e["seconds"]), total(lambda e: e["tokens"])
    drafted, accepted = total(lambda e: e["drafted"]), total(lambda e: e["accepted"])
    modelled: dict[str, float] = defaultdict(float)
    plays: dict[str, int] = defaultdict(int)
    faults: dict[str, int] = defaultdict(int)
    for e in epochs:
        for into, key in ((modelled, "modelled"), (plays, "plays"), (faults, "faults")):
            for name, value in (e.get(key) or {}).items():
                into[name] += value
    steps = sum(plays.values())
    none = modelled.get("fixed/none")
    return {
        "tokens": tokens,
        "steps": total(lambda e: e["steps"]),
        "acceptance_rate": accepted / drafted if drafted else None,
        "drafted_per_token": drafted / tokens,
        "after_end_share": total(lambda e: e["after_end"]) / tokens,
        "host_share": total(lambda e: e.get("propose_seconds")) / seconds,
        "tuner_share": total(lambda e: e.get("tuner_seconds")) / seconds,
        "alarms": total(lambda e: e.get("alarms")),
        "plays": {name: n / steps for name, n in plays.items()},
        "modelled": modelled,
        "modelled_speedup": {name: none / s for name, s in modelled.items() if s and "clock/" not in name}
        if none
        else {},
        "modelled_regret": modelled["played"] / modelled["oracle"] - 1.0 if none else None,
        "timed_regret": modelled["clock/played"] / modelled["clock/oracle"] - 1.0
        if modelled.get("clock/oracle")
        else None,
        "faults": faults,
    }


def table(result: dict[str, Any]) -> Table:
    """All arms for people, with the goals beneath."""
    rounds = len(next(iter(result["runs"].values())))
    t = Table(title=f"a batch that falls from {result['requests']} to 1, {rounds} rounds, nothing known before")
    columns = ("arm", "s/run", "speed-up", "95 % interval", "run", "later epochs", "accepted", "drafted/token", "host",
               "played")  # fmt: skip
    for column in columns:
        t.add_column(column, justify="left" if column in ("arm", "played") else "right")
    for name, a in result["arms"].items():
        s, later = a["speedup"], a["speedup_later_epochs"]
        most = sorted(a["plays"].items(), key=lambda p: -p[1])[:3]
        t.add_row(
            name,
            f"{a['seconds']:.2f}",
            f"{s['median']:.2f}x",
            f"{s['low']:.2f}-{s['high']:.2f}",
            f"{a['speedup_runs']['median']:.2f}x",
            f"{later['median']:.2f}x",
            f"{a['acceptance_rate']:.0%}" if a["acceptance_rate"] is not None else "-",
            f"{a['drafted_per_token']:.2f}",
            f"{a['host_share']:.1%}" if a["plays"] else "-",
            " ".join(f"{p.rsplit(':', 1)[-1]}:{share:.0%}" for p, share in most),
        )
    t.caption = "\n".join(_goals(result))
    return t


def _goals(result: dict[str, Any]) -> list[str]:
    lines = []
    if best := result.get("best_fixed"):
        f, whole = best["fixed_over_hedge"], best["fixed_over_hedge_runs"]
        lines.append(
            f"time of {best['arm']}, the best fixed, over hedge's: {f['median']:.3f} ({f['low']:.3f}-{f['high']:.3f}), "
            f"whole runs {whole['median']:.3f}; goal at least {best['goal']:g}: {best['verdict']}"
        )
    if oracle := result.get("oracle"):
        f, whole = oracle["hedge_over_oracle"], oracle["hedge_over_oracle_runs"]
        lines.append(
            f"time of hedge over the oracle's, measured: {f['median']:.3f} ({f['low']:.3f}-{f['high']:.3f}), "
            f"whole runs {whole['median']:.3f}; goal at most {oracle['goal']:g}: {oracle['verdict']}"
        )
    if (hedge := result["arms"].get("hedge")) and hedge["modelled_speedup"]:
        m = hedge["modelled_speedup"]
        fixed = max((name for name in m if name.startswith("fixed/")), key=m.__getitem__)
        timed = "" if hedge["timed_regret"] is None else f", corrected by timed steps {hedge['timed_regret']:.1%}"
        lines.append(
            f"hedge by the cost model: {m['played']:.2f}x; best fixed ({fixed.removeprefix('fixed/')} under its "
            f"budget) {m[fixed]:.2f}x, oracle {m['oracle']:.2f}x (regret {hedge['modelled_regret']:.1%}{timed}), "
            f"clairvoyant {m['clairvoyant']:.2f}x, perfect drafter {m['perfect']:.2f}x"
        )
        known = (hedge["timed_regret"], oracle and oracle["hedge_over_oracle"]["median"] - 1.0)
        if any(found is not None and abs(found - hedge["modelled_regret"]) > REGRETS_PART for found in known):
            lines.append(
                f"the regret by the cost model is more than {100 * REGRETS_PART:.0f} points from a measured one: the "
                "model is off for some arm"
            )
    if result["oracle_table"]:
        lines.append("best arm up to a batch of: " + ", ".join(f"{b}: {k}" for b, k in result["oracle_table"].items()))
    return lines
