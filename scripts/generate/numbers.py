"""The tables of numbers on the pages, from the files of benchmarks/results, so that the two cannot disagree.

A page has `<!-- results: NAME -->` and `<!-- end of results -->`; what stands between them is `BLOCKS[NAME]()`.
Inside a sentence it has `<!-- number: NAME -->` and `<!-- end of number -->`, for `INLINE[NAME]()`. Every row names its
file, so that the mark of a stale one stands beside the number. Links are written as from the root.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

from benchmarks.harness import step_ms
from benchmarks.peer_arms import OURS, PEERS
from benchmarks.peer_table import beside
from benchmarks.stale import RESULTS
from rollspec.telemetry.summary import ENOUGH_DRAFTED
from scripts.generate.cells import (
    both,
    count_of,
    listed,
    median_of,
    name_of,
    origin_of,
    percent,
    ratio_of,
    span,
    speed_of,
    table_of,
    time_of,
)  # fmt: skip
from scripts.generate.headline import (
    CONTROLS,
    DEMO,
    IF_MACHINE,
    WORKLOADS,
    Row,
    epochs,
    headline,
    load,
    minutes,
    size,
)  # fmt: skip

PROMPTS = ("fresh", "repeated")
GOAL = "2 %"  # of the null control: `GOAL` of benchmarks/control.py


def demo() -> str:
    """The demo's pair of runs."""
    d = load(DEMO)

    def compared(name: str) -> str:
        return both(ratio_of(r)) if (r := d["comparison"].get(name)) else "-"

    rows = [
        ("generation, from the second epoch on", compared("later")),
        ("the same, per token", compared("later_tokens_per_second")),
        ("generation, epoch by epoch", " / ".join(f"{r['value']:.2f}x" for r in epochs(d))),
        ("whole training step, all epochs", compared("step")),
        ("the phases without rollouts", compared("other_phases")),
        (f"generation relative to these phases, from the second epoch on ({IF_MACHINE})", compared("relative")),
        ("generation's share of a step, without", f"{100 * d['baseline']['gen_share']:.0f} %"),
        ("acceptance length; rate", f"{d['run']['accept_length']:.2f}; {100 * d['run']['accept_rate']:.0f} %"),
        ("reward, with - without", _difference(d["comparison"]["reward"], ".3f")),
        ("response length, with - without", _difference(d["comparison"]["length"], ".1f")),
        ("modelled, against the same engine without drafts", _modelled(d)),
        ("job", size(d)),
        ("both runs together", f"{minutes(d)} minutes"),
        ("measured on", origin_of(d)),
    ]
    return table_of(("", f"`{RESULTS}/{DEMO}.json`"), rows)


def control() -> str:
    """The null control of every model that it was run with."""
    rows = [
        (what, batch, _step(found, batch), *speed_of(r), str(r["n"]), origin_of(found), f"`{RESULTS}/{name}.json`")
        for name, what in CONTROLS.items()
        if (found := load(name))
        for batch, r in found["on_over_off"].items()
    ]
    columns = ("model", "batch", "a step without", "speed, K = 0 / without", "95 % interval", "pairs", "measured on",
               "file")  # fmt: skip
    return table_of(columns, rows)


def control_cost() -> str:
    """What being on costs where nothing is drafted, and whether the goal is reached."""
    found = load("control")
    more = span([100 * (r["median"] - 1) for r in found["on_over_off"].values()])
    steps = span([step_ms(found, batch) for batch in found["on_over_off"]])
    verdicts = {batch: found["at_most"][batch] for batch in found["on_over_off"]}
    same = len({*verdicts.values()}) == 1
    said = next(iter(verdicts.values())) if same else ", ".join(f"{v} at batch {b}" for b, v in verdicts.items())
    return f"{more} % of a step of {steps} ms; goal {GOAL}, {said}"


def control_times() -> str:
    """Time with nothing drafted over time without rollspec, by batch."""
    found = load("control")
    return " and ".join(
        f"{r['median']:.3f} ({r['low']:.3f}-{r['high']:.3f}) at batch {batch} "
        f"({(r['median'] - 1) * step_ms(found, batch):.1f} ms of a step of {step_ms(found, batch):.1f})"
        for batch, r in found["on_over_off"].items()
    )


def repeats() -> str:
    """How far two trainings of one job are apart without rollspec, and without and with it, by number format."""
    rows = [row for name in ("repeats", "repeats-float32") if (found := load(name)) for row in _repeated(name, found)]
    columns = ("mean difference of two runs, with - without", "both without rollspec", "without and with rollspec",
               "mean shift with it", "chance gives at most", "file")  # fmt: skip
    note = "*Chance gives at most*: the bound of the mean shift, 97.5 %, two-sided, from the pairs without rollspec."
    return f"{table_of(columns, rows)}\n\n{note}"


def _repeated(name: str, found: Any) -> Iterator[Row]:
    steps, dtype = len(found["groups"][0][0]), "float32" if name.endswith("float32") else "bfloat16"
    for label, what, form in (("length", "tokens a response", ".1f"), ("reward", "reward", ".3f")):
        r = found[label]
        pairs = [", ".join(f"{d:+{form}}" for d in r[side]) or "-" for side in ("without", "with")]
        shift = (f"{r['shift']:+{form}}", f"±{r['bound']:{form}}") if "shift" in r else ("-", "-")
        yield f"{what}, {dtype}, runs of {steps} steps", *pairs, *shift, f"`{RESULTS}/{name}.json`"


def lengths() -> str:
    """How far lengths under one fixed policy are apart without and with rollspec, by number format and seed."""
    said, single = [], []
    for name in ("lengths", "lengths-again"):  # a seed each; the first in both number formats
        if (found := load(name)) is not None:
            single += [r["later_epochs"] for dtype, r in found["dtypes"].items() if dtype == "float32"]
            parts = [
                f"in {dtype} by {d['tokens']:+.2f} tokens of {r['mean']['none']:.0f} "
                f"(standard error {d['error']:.2f}, z = {d['z']:+.1f}, {d['responses']:,} responses each)"
                for dtype, r in found["dtypes"].items()
                for d in [r["later_epochs"]]
            ]
            said.append(f"{' and '.join(parts)} (`{RESULTS}/{name}.json`, {origin_of(found)})")
    text = "; with another seed ".join(said) or "by what was not measured yet"
    if len(single) > 1:
        weights = [1 / d["error"] ** 2 for d in single]
        mean = sum(w * d["tokens"] for w, d in zip(weights, single, strict=True)) / sum(weights)
        error = sum(weights) ** -0.5
        text += (
            f"; the {len(single)} seeds in float32 together by {mean:+.2f} (standard error {error:.2f}, "
            f"z = {mean / error:+.1f})"
        )
    return text


def head() -> str:
    """What a draft head adds to a real model."""
    found = load("head")
    rows = []
    for batch, kinds in found["batches"].items():
        for kind in PROMPTS:
            for arm, a in kinds[kind].items():
                if arm != "none":
                    over = both(median_of(a["speedup_over_suffix"])) if a["speedup_over_suffix"] else "not measured"
                    name = "suffix drafts" if arm == "suffix" else arm
                    rows.append((batch, kind, name, both(median_of(a["speedup_over_none"])), over,
                                 f"{a['acceptance_length']:.2f}", percent(a["acceptance_rate"]),
                                 percent(a["pass_over_step"], 1)))  # fmt: skip
    columns = ("batch", "prompts", "arm", "over none", "over suffix drafts", "tokens per step", "accepted",
               "a pass of the head, of a step")  # fmt: skip
    on = origin_of(found)
    counts = {batch: kinds["fresh"]["none"]["speedup_over_none"]["n"] for batch, kinds in found["batches"].items()}
    pairs = ", ".join(f"{n} pairs at batch {batch}" for batch, n in counts.items())
    return (
        table_of(columns, rows)
        + f"\n\n`{RESULTS}/head.json`, {on}: {name_of(found['model'])}, {name_of(found['head'])}, "
        f"{found['samples_per_prompt']} {'sample' if found['samples_per_prompt'] == 1 else 'samples'} of each prompt "
        f"({name_of(found['prompts'])}), {pairs}, {_seeds(found)}. In brackets: the interval, under six pairs no more "
        "than their range. Each ratio is the median of its own pairs, of turns that ran close in time, so *over none* "
        "and *over suffix drafts* need not divide. " + control_line()
    )


def calibration() -> str:
    """Predicted over accepted draft tokens of the arms of `head`, by batch, and by who drafted."""
    found = load("head")
    by_batch: dict[str, list[float]] = {}
    by_source: dict[str, list[float]] = {}
    for batch, kinds in found["batches"].items():
        for kind in PROMPTS:
            for arm in kinds[kind].values():
                for source, c in arm.get("calibration", {}).items():
                    if c["ratio"] is not None and c["drafted"] >= ENOUGH_DRAFTED:
                        ratios, key = (by_batch, f"batch {batch}") if source == "all" else (by_source, f"`{source}`")
                        ratios.setdefault(key, []).append(c["ratio"])
    said = [
        ", ".join(f"{min(v):.2f} to {max(v):.2f} {word} {key}" for key, v in ratios.items())
        for word, ratios in (("at", by_batch), ("of", by_source))
    ]
    return f"{said[0]}; by who drafted {said[1]}, each of {ENOUGH_DRAFTED} tokens or more (`{RESULTS}/head.json`)"


def cost_fit() -> str:
    """Error of the cost model in engines of the default on the real model, each step predicted before it is learned."""
    turns = load("peers")["turns"]
    errors = [r["cost"]["error"] for t in turns for r in t["arms"][OURS] if r.get("cost")]
    return (
        f"{percent(median(errors), 1)}, and {percent(max(errors), 1)} in the worst of {len(errors)} epochs and bursts; "
        f"goal 10 % (`{RESULTS}/peers.json`)"
    )


def harm() -> str:
    """Nothing to gain on a real model: time over that without rollspec, and over the null control."""
    found = load("harm-smollm2")
    rows = []
    for batch, scenarios in found["batches"].items():
        for r in scenarios.values():
            ratios = [r[name] for name in ("rollspec_over_none", "control_over_none", "rollspec_over_control")]
            cells = [f"{x['median']:.3f} ({x['low']:.3f}-{x['high']:.3f})" for x in ratios]
            rows.append((batch, *cells, str(ratios[0]["n"])))
    columns = ("batch", "time over none", "null control (K = 0) over none", "over the null control", "rounds")
    missing = "" if "64" in found["batches"] else " Batch 64 was not run on this model."
    goal = f"Goal at most {next(r['goal'] for scenarios in found['batches'].values() for r in scenarios.values()):.3f}."
    at = f"`{RESULTS}/harm-smollm2.json`, {origin_of(found)}."
    return f"{table_of(columns, rows)}\n\n{goal}{missing} {at}"


def _seeds(found: Any) -> str:
    """Of how many seeds a result of `bench head` is; and of those prompts, how many the head had trained on."""
    first = next(iter(found["batches"].values()))
    done = [found["prompts_of_seeds"][seed] for seed in first.get("by_seed", ())]
    if not done:
        return "one seed"
    trained = sum(f["prompts_trained_on"] or 0 for f in done)
    return f"{len(done)} seeds; {trained} of the prompts were among those of training"


def propose() -> str:
    """Host time of drafting."""
    found = load("propose")
    rows = [
        (batch, f"{b['ms_per_step']:.2f} ms", f"{b['us_per_request']:.0f} us", f"{100 * b['share_of_step']:.1f} %")
        for batch, b in found["batches"].items()
    ]
    on = origin_of(found)
    load_ = found["provenance"]["load"]
    busy = f", load {load_[0]:.1f} before it" if load_ else ""
    return (
        table_of(("batch", "CPU time per step", "per request", "of the demo's step"), rows)
        + f"\n\n`{RESULTS}/propose.json`, {on}{busy}."
    )


def audit_power() -> str:
    """Shares of simulated audits that find a fault."""
    cells = load("audit_power")["power"]["cells"]
    sizes = sorted({cell["tokens"] for cell in cells})
    found = {(cell["bias"], cell["tokens"]): f"{100 * cell['found']:.0f} %" for cell in cells}
    rows = [(bias, *(found.get((bias, n), "-") for n in sizes)) for bias in dict.fromkeys(c["bias"] for c in cells)]
    note = f"Shares of audits that fail (`{RESULTS}/audit_power.json`), where so many tokens are replaced by such ones."
    return f"{table_of(('fault', *(f'{n:,} tokens' for n in sizes)), rows)}\n\n{note}"


def control_line() -> str:
    """The null control in one sentence, for pages that print ratios."""
    parts = []
    for name, what in CONTROLS.items():
        if found := load(name):
            at = [f"{both(speed_of(r))} at batch {batch}" for batch, r in found["on_over_off"].items()]
            parts.append(f"{' and '.join(at)} with {what} (`{RESULTS}/{name}.json`, {origin_of(found)})")
    return f"**Null control:** with nothing drafted (K = 0) the speed is {'; '.join(parts)}." if parts else ""


def tuner() -> str:
    """The arms of the tuner's benchmark, and what its goals say; nothing of a run without the arms of the goals."""
    found = load("tuner")
    if not {"best_fixed", "oracle"} <= found.keys():
        return ""
    rows: list[Row] = []
    for name, a in found["arms"].items():
        speeds = ("1", "1") if name == "none" else (both(median_of(a["speedup"])), both(median_of(a["speedup_runs"])))
        rows.append(
            (name, f"{a['seconds']:.1f}", *speeds, f"{a['drafted_per_token']:.2f}", percent(a["acceptance_rate"]))
        )
    columns = ("arm", "seconds", "over none, by epoch", "over none, by run", "drafted per token", "accepted")
    best, oracle = found["best_fixed"], found["oracle"]
    rounds = len(found["runs"]["none"])
    regret = found["arms"]["hedge"]
    goals = [
        f"{best['arm']} takes {both(time_of(best['fixed_over_hedge']))} of the time of `hedge`, the default; goal "
        f"{best['goal']:g}, {best['verdict']}.",
        f"`hedge` takes {both(time_of(oracle['hedge_over_oracle']))} of the oracle's; goal at most {oracle['goal']:g}, "
        f"{oracle['verdict']}.",
    ]
    if regret.get("timed_regret") is not None:
        goals.append(
            f"Its regret is {percent(regret['modelled_regret'], 1)} by the cost model and "
            f"{percent(regret['timed_regret'], 1)} by what its own steps took."
        )
    return (
        f"{table_of(columns, rows)}\n\n{' '.join(goals)} `{RESULTS}/tuner.json`, {origin_of(found)}, "
        f"{count_of(rounds)} rounds. {control_line()}"
    )


def steady() -> str:
    """The default's distance to the arm that was best at a batch size that stays."""
    if (found := load("tuner-steady-smollm2")) is None:
        return "It was not run yet."
    rows: list[Row] = []
    for batch, b in found["batches"].items():
        cells = [both(time_of(b[name])) for name in ("hedge_over_best", "hedge_over_best_later")]
        over_none = both(median_of(b["over_none"]["hedge"]))
        rows.append((batch, b["best"], *cells, f"{b['goal']:g}: {b['verdict_later']}", over_none))
    columns = ("batch", "best arm", "`hedge` / its time", "from the second epoch on", "goal", "over none")
    return f"{table_of(columns, rows)}\n\n`{RESULTS}/tuner-steady-smollm2.json`, {origin_of(found)}."


def peers_demo() -> str:
    """What rollspec's default gains on the demo's policy."""
    if (found := load("peers-demo")) is None:
        return "It was not run yet."
    workloads = found["summary"]["workloads"].items()
    parts = [f"*{w}* {both(median_of(s['arms']['rollspec']['speedup']))}" for w, s in workloads]
    at = f"`{RESULTS}/peers-demo.json`, {origin_of(found)}"
    return f"rollspec's default over no speculation: {', '.join(parts)} ({at})."


def here(arm: str) -> str:
    """An arm of `bench peers` over rollspec's default by workload, of the real model and of the demo's policy; the
    first result that has it of either.
    """
    said = []
    for what, names in (("", ("peers", "peers-published", "peers-further")), ("demo ", ("peers-demo",))):
        for found in filter(None, map(load, names)):
            speeds = {w: beside(s["arms"]) for w, s in found["summary"]["workloads"].items()}
            if over := {w: m[arm] for w, m in speeds.items() if arm in m}:
                said.append(what + " / ".join(f"{over[w]:.2f}x" if w in over else "-" for w in WORKLOADS))
                break
    return "; ".join(said) or "not measured"


def demo_pairs() -> str:
    """What the demo gave before the newest pair."""
    if (found := load("demo-pairs")) is None:
        return "They were not kept."
    said = []
    for of, name in (("of generation from the second epoch on", "later"), ("of the whole step", "step")):
        values = [pair[name]["value"] for pair in found["pairs"]]
        said.append(f"{min(values):.2f}x to {max(values):.2f}x {of} (median {median(values):.2f}x)")
    return (
        f"{len(found['pairs'])} pairs of earlier commits and settings gave {' and '.join(said)} "
        f"(`{RESULTS}/demo-pairs.json`)"
    )


def replicas() -> str:
    """One head for two replicas, against a head each."""
    if (found := load("drafter-replicas")) is None:
        return "It was not run yet."
    s, rows = found["replicas_setting"], found["replicas"]
    said = [f"{r['arm']} {r['length']:.2f} ({listed(r['lengths'], '.2f')})" for r in rows]
    return f"{'; '.join(said)} ({s['steps']} micro-steps; `{RESULTS}/drafter-replicas.json`, {origin_of(found)})"


BLOCKS: dict[str, Callable[[], str]] = {
    "headline": headline, "demo": demo, "control": control, "head": head, "propose": propose, "tuner": tuner,
    "audit-power": audit_power, "control-line": control_line, "repeats": repeats, "harm": harm, "steady": steady,
}  # fmt: skip
INLINE: dict[str, Callable[[], str]] = {
    "control-cost": control_cost, "control-times": control_times, "demo-pairs": demo_pairs, "peers-demo": peers_demo,
    "replicas": replicas, "lengths": lengths, "calibration": calibration,
    "cost-fit": cost_fit,
    **{f"here-{arm}": partial(here, arm) for arm in PEERS},
}  # fmt: skip


def _modelled(d: Any) -> str:
    found = d.get("limits")
    if not found or not found.get("got"):
        return "-"
    return (
        f"{found['got']:.2f}x; best fixed setting {found['best_fixed']:.2f}x, oracle {found['oracle']:.2f}x, "
        f"always accepted {found['perfect']:.1f}x"
    )


def _difference(d: Any, form: str) -> str:
    noise = f"; runs without differ by ±{d['noise']:{form}}" if d.get("noise") is not None else ""
    return f"{d['mean']:+{form}}{noise}"


def _step(found: Any, batch: str) -> str:
    return f"{step_ms(found, batch):.1f} ms" if "seconds" in found else "-"
