"""What reuse saves between two given policies: one epoch of each, in one engine, without a trainer.

    python -m benchmarks.replay --old START --new LATER

The old policy answers the demo's prompts, then the engine gets the new policy's weights and answers them again. Jobs
show what reuse does to a training; this shows what it saves, in a minute per arm, over as many seeds as are wanted.
`fixed` verifies every proposed token up to 16, so that what is saved depends on no clock.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.drift import CACHE
from benchmarks.harness import QUICK, pin, provenance, save
from benchmarks.options import numbers
from benchmarks.reuse import ARMS
from benchmarks.two_policies import rollouts
from examples.demo.job import JobSettings, prepare_assets

FIXED = ("proposal.budget.rule=fixed", "tuning.strategy=static", "tuning.guard.enabled=false")
LONGEST = 352


def measure(old: str, new: str, arm: str, seed: int, fixed: bool, quick: bool = False) -> dict[str, Any]:
    """One arm: what the new policy's epoch took."""
    from rollspec.audit.engine import AuditPlan, Variant
    from rollspec.audit.prompts import token_prompts

    assets = prepare_assets(JobSettings(seed=seed), CACHE / "grpo_arithmetic")
    most = 4 if quick else 32
    prompts = token_prompts(new, Path(assets.train), most, LONGEST)
    plan = AuditPlan(prompts, tokens=1, samples=8, max_tokens=LONGEST, seed=seed, min_rounds=1, max_rounds=1)
    given = ARMS[arm]
    if given is None:
        chosen = Variant.plain()
    else:
        more = FIXED if fixed and given[0] != "spec_rl" else ()
        seeded = (f"coupled.seed={seed}",) if given[0] == "coupled_reuse" else ()
        chosen = Variant.with_rollspec(given[0], (*given[1], *seeded, *more))
    output = rollouts(new, plan, chosen, old)
    tokens = output.samples.n_tokens
    return {
        "arm": arm,
        "seed": seed,
        "fixed": fixed,
        "tokens": tokens,
        "drafted": output.drafts.drafted,
        "by_drafts": output.drafts.accepted,
        "by_prefixes": int(output.kept.sum()),
        "saved": (output.drafts.accepted + int(output.kept.sum())) / tokens,
        "seconds": output.seconds,
    }


def summarise(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Per way of drafting and arm: means over seeds; and coupled over independent, seed by seed."""
    out: dict[str, Any] = {}
    for fixed in sorted({c["fixed"] for c in cells}):
        mine = [c for c in cells if c["fixed"] == fixed]
        by = {(c["arm"], c["seed"]): c for c in mine}
        arms = {
            arm: {
                "seeds": sorted(s for a, s in by if a == arm),
                "saved": statistics.mean(c["saved"] for c in mine if c["arm"] == arm),
                "drafted_per_token": statistics.mean(c["drafted"] / c["tokens"] for c in mine if c["arm"] == arm),
                "ms_per_token": statistics.mean(1e3 * c["seconds"] / c["tokens"] for c in mine if c["arm"] == arm),
            }
            for arm in dict.fromkeys(c["arm"] for c in mine)
        }
        ratios = {
            s: by["coupled", s]["saved"] / by["independent", s]["saved"]
            for a, s in by
            if a == "coupled" and ("independent", s) in by
        }
        out["fixed" if fixed else "default"] = {"arms": arms, "coupled_over_independent": ratios}
    return out


def run(old: str, new: str, seeds: list[int], quick: bool = False, out: Path | None = None) -> Path:
    """Print and save."""
    pin()
    console = Console(stderr=True)
    began = provenance()
    cells = []
    if quick:
        console.print(QUICK)
    for seed in seeds[:1] if quick else seeds:
        for arm in ARMS:
            for fixed in (True, False) if arm in ("independent", "coupled") and not quick else (False,):
                cells.append(measure(old, new, arm, seed, fixed, quick))
                console.print(cells[-1], highlight=False)
    found = summarise(cells)
    table = Table(title="one epoch after an update: tokens saved")
    for column in ("drafting", "arm", "saved", "drafted / token", "ms / token"):
        table.add_column(column, justify="left" if column in ("drafting", "arm") else "right")
    for how, part in found.items():
        for arm, a in part["arms"].items():
            table.add_row(how, arm, f"{a['saved']:.1%}", f"{a['drafted_per_token']:.2f}", f"{a['ms_per_token']:.2f}")
    console.print(table)
    return save(
        "replay" + ("-quick" if quick else ""),
        {"benchmark": "replay", "provenance": began, "old": old, "new": new, "cells": cells, "summary": found},
        out,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", required=True, help="checkpoint of the earlier policy")
    parser.add_argument("--new", required=True, help="checkpoint of the later one")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--quick", action="store_true", help="show that it runs")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    print(run(args.old, args.new, list(numbers("--seeds", args.seeds)), args.quick, args.out))
