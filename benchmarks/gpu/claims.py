"""What the numbers say, claim by claim: the goal, what was measured, and whether it holds.

A claim counts only from a GPU, by a revision that somebody else can check out. A dry run and a changed tree show their
numbers and claim nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.harness import Ratio, verdict

DEVICE_US = 50.0
"""Most microseconds of `propose` on the device."""
HOST_SHARE = 0.03
"""Most of a step that `propose` takes of the host at batch 64."""
CAPTURE = 1.01
"""Most that capturing may multiply a step's time by."""

Found = dict[str, Any]
Said = tuple[str, str]
"""What was measured, and `holds`, `fails`, `undecided` or `measured` (no goal)."""


def unclaimed_because(result: Found) -> str | None:
    """Why nothing may be claimed from this result; None where it may."""
    if result["dry"]:
        return "a dry run on a CPU: it shows that the suite runs, and its numbers mean nothing"
    if result["commit"] is None:
        return "it is not known from which commit this was measured"
    if not result["clean"]:
        return "the tree differs from its commit"
    return None


def of(result: Found) -> list[dict[str, str]]:
    """One row per claim: `what`, `goal`, `measured`, `state`. What was not measured says why."""
    why = unclaimed_because(result)
    rows = []
    for part, what, goal, judge in CLAIMS:
        found = result["parts"].get(part)
        if found is None:
            measured, state = "not asked for", "not measured"
        elif found["state"] != "done":
            measured, state = found["reason"], "fails" if found["state"] == "failed" else "not measured"
        else:
            measured, state = judge(found["found"])
        rows.append({"part": part, "what": what, "goal": goal, "measured": measured, "state": state})
    rows += _curves(result)
    if why is not None:
        rows = [
            r | {"state": r["state"] if r["state"] == "not measured" else f"not claimed ({r['state']})"} for r in rows
        ]
    return rows


def headline(result: Found) -> str:
    """What the whole says, in one sentence that claims no more than it."""
    why = unclaimed_because(result)
    if why is not None:
        return f"nothing is claimed: {why}"
    states = [c["state"] for c in result["claims"]]
    holds, fails = states.count("holds"), states.count("fails")
    rest = len(states) - holds - fails - states.count("measured")
    return f"{result['device']['name']}: {holds} claims hold, {fails} fail, {rest} are open"


def _start(f: Found) -> Said:
    if f["state"] == "off":
        return f"rollspec is off: {f['reason']}", "fails"
    runner = "second runner" if f["v2_runner"] else "first runner"
    graphs = ", ".join(f"{n} {kind}" for kind, n in f["graphs"]["captured"].items()) or "none captured"
    replayed = f.get("graphs_replayed") or {}
    if replayed:
        graphs += f"; {replayed.get('FULL', 0)} of {sum(replayed.values())} steps replay a full one"
    ahead = "asynchronous" if f["asynchronous"] else "synchronous"
    return f"{runner}; graphs: {graphs}; {ahead}; {f['start_seconds']:.0f} s", "holds" if f["holds"] else "fails"


def _identity(f: Found) -> Said:
    said = f"{f['parted']} of {f['requests']} texts differ; {f['accepted']:.0f} of {f['drafted']:.0f} drafts accepted"
    return said, "fails" if f["parted"] else "holds" if f["accepted"] else "undecided"


def _control(f: Found) -> Said:
    return f"{f['parted']} of {f['requests']} texts differ", "measured"


def _propose(f: Found) -> Said:
    times = [r["device_us"] for r in f["batches"]]
    waits = sum(r["synchronisations"] for r in f["batches"])
    if any(t is None for t in times):
        return f"host only: {max(r['host_us'] for r in f['batches']):.0f} us", "undecided"
    worst = max(times)
    said = f"{worst:.0f} us at the slowest batch, {waits} synchronisations"
    return said, "holds" if worst <= DEVICE_US and not waits and f["error_mode_passed"] else "fails"


def _host(f: Found) -> Said:
    row = next((r for r in f["batches"] if r["batch"] == 64), f["batches"][-1])
    said = f"{100 * row['host_share']:.1f} % of a step at batch {row['batch']} ({row['host_us']:.0f} us)"
    return said, "holds" if row["host_share"] <= HOST_SHARE else "fails"


def _swap(f: Found) -> Said:
    steps = f["pause_steps"]
    said = f"median {f['pause_ms']['median']:.2f} ms, p99 {f['pause_ms']['p99']:.2f} ms = {steps['p99']:.2f} steps"
    return said, "holds" if steps["p99"] <= 1 else "fails"


def _capture(f: Found) -> Said:
    ratios = {batch: Ratio(**row["ratio"]) for batch, row in f.items()}
    states = [verdict(r, CAPTURE) for r in ratios.values()]
    said = ", ".join(f"batch {b}: {r.median:.3f} ({r.low:.3f}-{r.high:.3f})" for b, r in ratios.items())
    return said, "fails" if "missed" in states else "holds" if set(states) == {"reached"} else "undecided"


def _kernels(f: Found) -> Said:
    wrong = sum(r["wrong"] for r in f["rows"])
    worst: dict[str, Found] = {}
    for row in f["rows"]:
        if row["device_us"] is not None and row["device_us"] >= worst.get(row["kernel"], row)["device_us"]:
            worst[row["kernel"]] = row
    times = ", ".join(f"{name} {r['device_us']:.1f} us at batch {r['batch']}" for name, r in worst.items())
    return f"{wrong} wrong; {times or 'no device times'}", "fails" if wrong else "holds" if times else "undecided"


def _training(f: Found) -> Said:
    return (
        f"{f['tokens_per_second']:,.0f} tokens/s, {f['micro_step_ms']:.0f} ms a micro-step ({f['shape']})",
        "measured",
    )


def _acceptance(f: Found) -> Said:
    last = {arm: epochs[-1] for arm, epochs in f["epochs"].items()}
    return "; ".join(f"{arm} {e['tokens_per_verification']:.2f}" for arm, e in last.items()), "measured"


CLAIMS: tuple[tuple[str, str, str, Callable[[Found], Said]], ...] = (
    ("start", "An engine starts on the second runner", "full CUDA graphs, asynchronous scheduling", _start),
    ("exact/greedy", "Greedy texts are those without drafts", "0 differ", _identity),
    ("exact/coupled", "Coupled texts at temperature 1 are those without drafts", "0 differ", _identity),
    ("exact/storm", "Mixed requests in any batch say the same", "0 differ", _identity),
    ("exact/control", "Texts without drafts that differ in batches of another size (control)", "-", _control),
    ("invariant/greedy", "Greedy texts, batch-invariant kernels", "0 differ", _identity),
    ("invariant/coupled", "Coupled texts at temperature 1, batch-invariant kernels", "0 differ", _identity),
    ("invariant/storm", "Mixed requests, batch-invariant kernels", "0 differ", _identity),
    ("invariant/control", "Texts without drafts in batches of another size, batch-invariant kernels", "-", _control),
    ("propose", "Device time of propose", f"at most {DEVICE_US:.0f} us, no synchronisation", _propose),
    ("propose", "Host time of propose", f"at most {100 * HOST_SHARE:.0f} % of a step", _host),
    ("kernels", "Verification on the device", "as its plain definition", _kernels),
    ("swap", "Pause of a swap", "p99 below one step", _swap),
    ("capture", "Capturing training samples", f"time at most {CAPTURE}x", _capture),
    ("training", "Idle training of a head", "-", _training),
    ("acceptance", "Tokens per verify step, last epoch", "-", _acceptance),
)
"""(part, what, goal, judge)."""


def _curves(result: Found) -> list[dict[str, str]]:
    """Per shape, what each arm's step costs over none's at the smallest and the largest batch, and what it yields."""
    rows = []
    for shape, arms in curves(result).items():
        for arm, batches in arms.items():
            if arm == "none" or "none" not in arms:
                continue
            both = [(a, b) for a, b in zip(batches, arms["none"], strict=False) if a["batch"] == b["batch"]]
            said = "; ".join(
                f"batch {a['batch']}: step {a['step_ms'] / b['step_ms']:.2f}x, "
                f"tokens/s {a['tokens_per_second'] / b['tokens_per_second']:.2f}x"
                for a, b in (both[:1] + both[-1:])
            )
            rows.append(
                {"part": f"cost/{shape}/{arm}", "what": f"Cost of a step over none, {shape}, {arm}", "goal": "-",
                 "measured": said, "state": "measured"}
            )  # fmt: skip
    return rows


def curves(result: Found) -> dict[str, dict[str, list[Found]]]:
    """Measured rows by shape and arm."""
    out: dict[str, dict[str, list[Found]]] = {}
    for name, part in result["parts"].items():
        if name.startswith("cost/") and part["state"] == "done":
            found = part["found"]
            out.setdefault(found["shape"], {})[found["arm"]] = found["batches"]
    return out
