"""The file of `rollspec bench peers` while it is being made: gone on from where it fits, else put aside."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.peer_plan import Cell
from benchmarks.stale import MEASURES, ROOT, changed

CODE = (*MEASURES["peers"], "benchmarks", ":(exclude)benchmarks/results", "configs", "rollspec/config",
        "examples/grpo_arithmetic")  # fmt: skip
"""What decides what a turn is."""

FORMAT = "rollspec-peers-1"
KEPT = ("provenance", "lengths", "seconds", "start", "turns", "ruled", "overlapping", "distance")
"""What is taken over from an earlier call."""


def key(result: dict[str, Any]) -> Any:
    """What has to agree before an earlier result is gone on from, beside the code."""
    made = result["provenance"]
    place = [made.get(name) for name in ("cpu", "cores", "engines_on", "trainer_on", "OMP_NUM_THREADS", "versions")]
    return [result.get("format"), result["policy"], result["settings"], *place]


def begin(mine: dict[str, Any], out: Path, console: Console) -> dict[str, Any]:
    """What an earlier call left in `out`, where that was of the same code, policy, settings and kind of machine, else
    `mine`. An earlier result of another kind keeps its turns, in a file beside it.
    """
    try:
        earlier = json.loads(out.read_text())
        then, now = earlier["provenance"], mine["provenance"]
        # A tree that differs from its commit may have changed since.
        same = key(earlier) == key(mine) and not (then["dirty"] or now["dirty"])
        same = same and (then["git"] == now["git"] or not changed(ROOT, then["git"], CODE))
    except (OSError, ValueError, KeyError, TypeError):
        return mine
    if same:
        console.print(f"resumes from {len(earlier['turns'])} finished turns in {out}", highlight=False)
        return mine | {k: earlier[k] for k in KEPT if k in earlier}
    if earlier["turns"]:
        aside = out.with_suffix(".json.before")
        out.replace(aside)
        console.print(f"{out} is of other code, model, settings or machine; it is {aside} from now on", highlight=False)
    return mine


def finished(turns: Sequence[Mapping[str, Any]]) -> dict[str, set[Cell]]:
    """Seeds and workloads that each arm has done."""
    done: dict[str, set[Cell]] = {}
    for turn in turns:
        for name in turn["arms"]:
            done.setdefault(name, set()).add((turn["seed"], turn["workload"]))
    return done
