"""The table of README.md and of docs/index.md: what is faster, what is not, and the null control."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.stale import RESULTS, ROOT
from scripts.generate.cells import joined, median_of, origin_of, ratio_of, speed_of, table_of

DEMO = "demo-0.32"
CONTROLS = {"control": "the demo's policy", "control-smollm2": "SmolLM2-135M"}
WORKLOADS = {
    "epochs": "from the second epoch on, batch 32",
    "fresh": "new prompts, batch 16",
    "shift": "after a shift of topic, batch 1 to 8",
    "full": "a full batch of 64",
}
"""Of `bench peers`, in words."""
SIDE_BY_SIDE = {"peers": "", "peers-further": " in float32"}
"""Results of `bench peers` that stand in the table, and in what they differ."""
INTERVAL = "95 % interval; range under six pairs"
MEDIANS = "Where a row is of several pairs, a ratio is their median, so two ratios need not divide into a third."
IF_MACHINE = "right only if the machine, and not rollspec, changed their speed"
Row = tuple[str, ...]


def load(name: str, root: Path = ROOT) -> Any:
    """A result; None where there is none."""
    path = root / RESULTS / f"{name}.json"
    return json.loads(path.read_bytes()) if path.is_file() else None


def headline() -> str:
    """The table of README.md and of docs/index.md: what is faster, what is not, and the null control."""
    rows: list[Row] = []
    if demo := load(DEMO):
        rows += _demo_rows(demo)
    for name, what in CONTROLS.items():
        if found := load(name):
            label = f"**null control**: nothing drafted (K = 0), {what}, batch {' / '.join(found['on_over_off'])}"
            rows.append((label, *joined(map(speed_of, found["on_over_off"].values())), f"`{name}.json`"))
    if found := load("head"):
        rows += _head_rows(found)
    for name, how in SIDE_BY_SIDE.items():
        if found := load(name):
            rows += _peer_rows(name, how, found)
    if tail := load("long_tail"):
        whole = tail["summary"]["head_and_suffix_over_suffix"]["all"]["sums"]
        label = "a draft head per replica trained while the job runs, over suffix drafts alone: generation, a whole job"
        rows.append((label, f"{whole:.2f}x", "one job", "`long_tail.json`"))
    note = f"`make demo`: {size(demo)}, {minutes(demo)} minutes for both. {_pairs()}" if demo else ""
    names = [name for row in rows for name in re.findall(r"`([^`]+)\.json`", row[-1])]
    table = table_of(("", "speed-up", INTERVAL, "file"), rows)
    return f"{table}\n\n{note}{MEDIANS} {_machines(names)}"


def _demo_rows(d: Any) -> Iterator[Row]:
    c, at = d["comparison"], f"`{DEMO}.json`"
    share = [100 * d[side]["gen_share"] for side in ("run", "baseline")]
    value, interval = ratio_of(c["later"])
    yield f"`make demo`: generation, {_later(d)}", f"**{value}**", interval, at
    first = "`make demo`: generation, epoch 1 (no past responses yet, and costs are still being learned)"
    yield first, *ratio_of(epochs(d)[0]), at
    of = f"generation is {min(share):.0f} to {max(share):.0f} % of it"
    if (rest := c.get("other_phases")) and rest["high"] < 1:
        why = "[why is not settled](docs/benchmarks.md#phases-without-rollouts)"
        of += f"; the other phases were slower in the run with rollspec, {ratio_of(rest)[0]}, {why}"
    yield f"`make demo`: the whole training step, all epochs ({of})", *ratio_of(c["step"]), at


def _head_rows(d: Any) -> Iterator[Row]:
    """Of new prompts; over suffix drafts also of the same prompts again, which these know then."""
    batches = " / ".join(d["batches"])
    for of, name, kind, prompts in (
        ("no drafts", "speedup_over_none", "fresh", "new prompts"),
        ("suffix drafts alone", "speedup_over_suffix", "fresh", "new prompts"),
        ("suffix drafts alone", "speedup_over_suffix", "repeated", "the same prompts again"),
    ):
        found = [kinds[kind]["head"] for kinds in d["batches"].values() if "head" in kinds[kind]]
        if found and all(arm[name] for arm in found):
            label = f"draft head and suffix drafts over {of}, SmolLM2-135M, {prompts}, batch {batches}"
            yield label, *joined(median_of(arm[name]) for arm in found), "`head.json`"


def _peer_rows(name: str, how: str, d: Any) -> Iterator[Row]:
    """Side by side with published methods: the default, and with a head, over no drafts, by workload."""
    workloads = d["summary"]["workloads"]
    for arm, what in (("rollspec", "the default preset"), ("rollspec+head", "draft head and suffix drafts")):
        found = {w: s["arms"][arm]["speedup"] for w, s in workloads.items() if arm in s["arms"]}
        if found:
            where = " / ".join(WORKLOADS.get(w, w) for w in found)
            yield (
                f"{what} over no drafts, SmolLM2-135M{how}: {where}",
                *joined(map(median_of, found.values())),
                f"`{name}.json`",
            )


def _pairs() -> str:
    """What earlier pairs of the demo gave, which differ by more than the interval of one."""
    if (found := load("demo-pairs")) is None:
        return ""
    values = [pair["later"]["value"] for pair in found["pairs"]]
    return (
        f"Its intervals resample the steps of this one pair; {len(values)} pairs of earlier commits gave "
        f"{min(values):.2f}x to {max(values):.2f}x ([the demo](docs/benchmarks.md#the-demo)). "
    )


def _machines(names: Sequence[str]) -> str:
    """Which file is of which machine, in a sentence."""
    at: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        at.setdefault(origin_of(load(name)).split(", 20")[0], []).append(name)
    if len(at) == 1:
        return f"All on {next(iter(at))}."
    return "; ".join(f"{', '.join(files)}: {machine}" for machine, files in at.items()) + "."


def _later(d: Any) -> str:
    last = len(epochs(d))
    return f"epochs 2 to {last}" if last > 2 else "epoch 2"


def epochs(d: Any) -> list[Any]:
    """Ratios of the demo's generation, epoch by epoch."""
    return [r for _, r in sorted(d["comparison"]["by_epoch"].items(), key=lambda item: int(item[0]))]


def size(d: Any) -> str:
    """The demo's job, in words."""
    s, steps = d["provenance"]["rollspec"]["settings"], d["comparison"]["steps"]
    timed = d["comparison"].get("timed", steps)
    first = "" if timed == steps else "; ratios leave out the first step"
    return (
        f"verl GRPO, 16 M-parameter policy in {s['dtype']}, {s['train_prompts']} prompts of {s['n']} samples, {steps} "
        f"steps over {d['run']['epochs']} epochs, one run with and one without{first}"
    )


def minutes(d: Any) -> str:
    """Of both runs."""
    return f"{sum(run['wall_seconds'] for run in d['provenance'].values()) / 60:.0f}"
