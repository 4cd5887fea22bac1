"""What the turns of `rollspec bench peers` say: ratios pair by pair by workload, and who wins."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from benchmarks.harness import ratio
from benchmarks.peer_arms import NONE, OURS, PEERS
from benchmarks.peer_load import LATER, batches, later
from rollspec.config.sections import ProposalConfig

TOLERANCE = 1.02
"""An arm is faster than rollspec's default where the lower end of its interval is above this."""

LONGEST: int = ProposalConfig.model_fields["k_max"].default
"""Draft tokens of a request at most, in rollspec's default."""

COLUMNS = ("arm", "over none", "95 %", "whole turn", "over rollspec", "95 %", "tokens/s", "τ", "α", "pairs")

Turn = Mapping[str, Any]
"""One seed of one workload: `seed`, `workload`, and under `arms`, by name, what the engine measured in each work."""


def summarise(turns: Sequence[Turn], lengths: Mapping[str, Any]) -> dict[str, Any]:
    """By workload, and over all of them; `lengths` as `Load` has them."""
    found: dict[str, Any] = {}
    for workload in dict.fromkeys(t["workload"] for t in turns):
        mine = [t for t in turns if t["workload"] == workload]
        names = {name for t in mine for name in t["arms"]}
        arms = {name: _arm(name, workload, mine) for name in PEERS if name in names}
        found[workload] = {
            "arms": arms,
            "best": _best(beside(arms)),
            "perfect": perfect(workload, mine, lengths.get(workload, {})),
            "faster": [n for n, over in ratios(arms).items() if over["low"] > TOLERANCE],
        }
    return {"workloads": found, "overall": _overall(found)}


def ratios(arms: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Every arm over rollspec's default, by pairs of the two; of no speculation it is the default's own, inverted.

    Arms of different heats were not paired with the same turns of `none`, so their speed-ups over it say less.
    """
    found: dict[str, Mapping[str, Any]] = {n: a["over_ours"] for n, a in arms.items() if a["over_ours"]}
    if OURS in arms:
        found |= {OURS: dict.fromkeys(("median", "low", "high"), 1.0), NONE: inverted(arms[OURS]["speedup"])}
    return found


def beside(arms: Mapping[str, Any]) -> dict[str, float]:
    """The medians of `ratios`."""
    return {n: over["median"] for n, over in ratios(arms).items()}


def inverted(ratio: Mapping[str, Any]) -> dict[str, Any]:
    """The same ratio the other way round."""
    return {"median": 1 / ratio["median"], "low": 1 / ratio["high"], "high": 1 / ratio["low"], "n": ratio["n"]}


def _seconds(workload: str, runs: Sequence[Mapping[str, Any]], whole: bool = False) -> list[float]:
    """What is compared pair by pair: each later epoch by itself, other turns (or their later part) as sums."""
    some = [r["seconds"] for r in (runs if whole else later(workload, runs))]
    return some if workload == "epochs" and not whole else [sum(some)]


def ratio_of(base: str, name: str, workload: str, turns: Sequence[Turn], whole: bool = False) -> dict[str, Any] | None:
    """How much faster `name` is than `base` in a workload, of turns in which both ran; None where there are none."""
    pairs = [
        pair
        for t in turns
        if base in t["arms"] and name in t["arms"]
        for pair in zip(
            _seconds(workload, t["arms"][base], whole), _seconds(workload, t["arms"][name], whole), strict=True
        )
    ]
    return asdict(ratio([a for a, _ in pairs], [b for _, b in pairs])) if pairs else None


def _arm(name: str, workload: str, turns: Sequence[Turn]) -> dict[str, Any]:
    every = [r for t in turns if name in t["arms"] for r in later(workload, t["arms"][name])]
    tokens, accepted, drafted, seconds = (
        sum(r[k] for r in every) for k in ("tokens", "accepted", "drafted", "seconds")
    )
    faults: dict[str, int] = {}
    for r in every:
        for cause, n in (r.get("faults") or {}).items():
            faults[cause] = faults.get(cause, 0) + n
    return {
        "speedup": ratio_of(NONE, name, workload, turns),
        "whole": ratio_of(NONE, name, workload, turns, whole=True),
        "over_ours": None if name in (NONE, OURS) else ratio_of(OURS, name, workload, turns),
        "tokens_per_second": tokens / seconds,
        "acceptance_length": tokens / (tokens - accepted) if tokens > accepted else None,
        "acceptance_rate": accepted / drafted if drafted else None,
        "kept_share": sum(r.get("kept", 0) for r in every) / tokens,
        "faults": faults,
    }


def _best(speedups: Mapping[str, float]) -> str | None:
    """The fastest lossless arm but rollspec's own."""
    others = {n: s for n, s in speedups.items() if not n.startswith(OURS) and not PEERS[n].lossy}
    return max(others, key=others.__getitem__, default=None)


def _overall(found: Mapping[str, Any]) -> dict[str, Any]:
    """Geometric means over the workloads: of rollspec's default over none, and of the best other arm that did all of
    them beside it.
    """
    speeds = {w: beside(s["arms"]) for w, s in found.items()}
    everywhere = set.intersection(*map(set, speeds.values())) if speeds else set()
    means = {n: math.prod(m[n] for m in speeds.values()) ** (1 / len(speeds)) for n in PEERS if n in everywhere}
    best = _best(means)
    return {"ours": 1.0 / means[NONE] if NONE in means else None, "best": best, "best_over_ours": means.get(best or "")}


def perfect(workload: str, turns: Sequence[Turn], lengths: Mapping[str, Any]) -> float | None:
    """Speed-up over none of drafts that are all accepted and cost nothing: every token is computed in any case, and so
    is every prompt; what is saved is the part of a step that does not depend on its tokens, by the line that rollspec
    fitted to its own steps. None where no turn has one.
    """
    spent = saved = 0.0
    for t in turns:
        none, ours = t["arms"].get(NONE, ()), t["arms"].get(OURS, ())
        known = lengths.get(str(t["seed"]), ())
        rows = list(zip(none, ours, known, batches(workload, len(none)), strict=False))
        for plain, run, said, batch in later(workload, rows):
            if (run.get("cost") or {}).get("fitted"):
                spent += plain["seconds"]
                saved += run["cost"]["c0"] * max(plain["steps"] - least_steps(said, batch), 0)
    return spent / (spent - saved) if spent else None


def least_steps(lengths: Sequence[int], batch: int, k: int = LONGEST) -> int:
    """Steps in which responses of these lengths end, at most `batch` at once, if `k` draft tokens are all accepted: a
    token comes with the prompt, and then `k + 1` a step.
    """
    ends = [0] * batch
    for n in lengths:
        heapq.heapreplace(ends, ends[0] + 1 + math.ceil((n - 1) / (k + 1)))
    return max(ends)


def rows(arms: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A line per arm, the fastest first, under `COLUMNS`."""
    out: list[tuple[str, ...]] = []
    speeds = beside(arms)
    for name, a in sorted(arms.items(), key=lambda item: -speeds.get(item[0], 0.0)):
        s, whole, over = a["speedup"], a["whole"], a["over_ours"]
        out.append((
            name + (" (lossy)" if PEERS[name].lossy else ""),
            *((f"{s['median']:.2f}x", f"{s['low']:.2f}-{s['high']:.2f}", f"{whole['median']:.2f}x")
              if name != NONE else ("1", "-", "1")),
            *((f"{over['median']:.2f}x", f"{over['low']:.2f}-{over['high']:.2f}") if over else ("-", "-")),
            f"{a['tokens_per_second']:.0f}",
            f"{a['acceptance_length']:.2f}" if a["acceptance_length"] else "-",
            f"{100 * a['acceptance_rate']:.0f} %" if a["acceptance_rate"] is not None else "-",
            str(s["n"]),
        ))  # fmt: skip
    return out


def table(workload: str, summary: Mapping[str, Any]) -> Table:
    """One workload for people."""
    t = Table(title=f"{workload}{', ' + LATER[workload] if workload in LATER else ''}")
    for column in COLUMNS:
        t.add_column(column, justify="left" if column == "arm" else "right")
    for row in rows(summary["arms"]):
        t.add_row(*row)
    return t


def swept(arms: Mapping[str, Any]) -> dict[str, tuple[str, list[str]]]:
    """Of each family with several draft lengths (`ngram K=2`, `ngram K=4`): the fastest, and all that ran."""
    speeds = beside(arms)
    families: dict[str, list[str]] = {}
    for name in speeds:
        if " K=" in name:
            families.setdefault(name.partition(" ")[0], []).append(name)
    return {f: (max(names, key=speeds.__getitem__), names) for f, names in families.items() if len(names) > 1}


def counted(pairs: int) -> str:
    """How many pairs, in words that fit one."""
    return f"{pairs} pair{'s' if pairs > 1 else ''}"


def sentences(summary: Mapping[str, Any]) -> list[str]:
    """Who wins, workload by workload and over all."""
    out = []
    for workload, s in summary["workloads"].items():
        found, best = ratios(s["arms"]), s["best"]
        named = ", ".join(f"`{n}` ({counted(found[n]['n'])})" for n in s["faster"])
        said = f"*{workload}*: "
        if best and OURS in s["arms"]:
            ours, other = s["arms"][OURS]["speedup"]["median"], s["arms"][best]
            said += f"rollspec's default {ours:.2f}x; of the other lossless arms `{best}` is best"
            if over := other["over_ours"]:
                said += f", {over['median']:.2f}x ({over['low']:.2f}-{over['high']:.2f}) of rollspec's"
            said += ". "
        if s["perfect"]:
            said += f"If every draft of {LONGEST} tokens were accepted, and cost nothing: {s['perfect']:.2f}x. "
        for family, (name, names) in swept(s["arms"]).items():
            said += f"Of {len(names)} lengths of `{family}` the best is {name.partition(' ')[2]}. "
        out.append(f"{said}Arms whose whole interval is more than 2 % above it: {named or 'no arm'}.")
    overall = summary["overall"]
    if overall["best_over_ours"] is not None:
        out.append(
            f"Over the workloads that were run (geometric mean): rollspec's default {overall['ours']:.2f}x; the best "
            f"other arm that ran in all of them, `{overall['best']}`, is {overall['best_over_ours']:.2f}x of it."
        )
    return out
