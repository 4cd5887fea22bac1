"""The parts of the suite, in the order of what is worth most, and which of them fit in the minutes.

A part names the function that measures it (`module:function` of this package), which runs in a process of its own and
gets a `Spec`. `minutes` is about what it took on one H100 whose caches were empty: each engine of it starts in 1 to 2.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from benchmarks.gpu.machine import Device

BATCHES = (1, 4, 16, 64, 256)
DRY_BATCHES = (1, 2)
DRY_MINUTES = 0.1
ARMS = ("none", "ngram", "eagle3", "rollspec")
SHAPES = ("qwen3-1.7b", "qwen3-8b")


class NotHereError(Exception):
    """This part cannot be measured here; the sentence says what is missing. It is no failure."""


@dataclass(frozen=True)
class Spec:
    """The settings of one part."""

    device: Device
    dry: bool
    folder: str  # for models that are made here
    model: str | None = None  # a real checkpoint; None: the demo's policy
    head: str | None = None  # of that checkpoint
    prompts: str | None = None  # for it; None: built-in ones
    engine: Mapping[str, Any] = field(default_factory=dict)  # options of every `vllm.LLM`
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def quick(self) -> bool:
        """As few repetitions as show that it runs."""
        return self.dry


@dataclass(frozen=True)
class Part:
    """One thing that is measured."""

    name: str
    title: str
    function: str
    minutes: float
    vllm: bool = True
    timed: bool = True  # nothing else may run meanwhile
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def spec(self, device: Device, folder: str, **given: Any) -> dict[str, Any]:
        """The `Spec` of this part as JSON."""
        return asdict(Spec(device, device == "cpu", folder, arguments=dict(self.arguments), **given))


def parts(device: Device, head: bool = False) -> list[Part]:
    """All parts, the ones that matter most first; of the cost curves the small shape's.

    Args:
        head: whether there is a real head to measure.
    """
    dry = device == "cpu"
    batches = list(DRY_BATCHES if dry else BATCHES)
    found = [
        Part("kernels", "Device time of verifying", "kernels:measure", 0.3, vllm=False),
        Part("training", "Idle training of a head", "training:measure", 0.7, vllm=False),
        Part("start", "Engine start", "start:measure", 2.1),
        *([Part("speed", "Speed on a real model with a real head", "speed:measure", 10.0)] if head else []),
        Part("exact/greedy", "Greedy identity", "exact:greedy", 3.5, timed=False),
        Part("exact/coupled", "Coupled identity at temperature 1", "exact:coupled", 3.5, timed=False),
        Part("propose", "Device and host time of propose", "propose:measure", 2.0),
        Part("exact/storm", "A storm of mixed requests", "exact:mixed", 4.0, timed=False),
        Part("exact/control", "Rounding without drafts", "exact:control", 3.5, timed=False),
        Part("swap", "Pause of a swap of drafter weights", "swaps:pauses", 2.5),
        Part("capture", "Cost of capturing training samples", "swaps:capture", 3.0),
        Part("acceptance", "Acceptance on a real model", "curve:acceptance", 4.0),
    ]
    for shape in ("tiny",) if dry else SHAPES:
        found += [
            Part(
                f"cost/{shape}/{arm}",
                f"Cost of a decode step, {shape}, {arm}",
                "curve:cost",
                3.0 if shape == SHAPES[-1] else 2.2,
                arguments={"shape": shape, "arm": arm, "batches": batches},
            )
            for arm in ARMS
        ]
    if dry:
        return [replace(p, minutes=DRY_MINUTES) for p in found]
    return found + [  # vLLM has these kernels on GPUs
        replace(p, name=p.name.replace("exact", "invariant"), title=f"{p.title}, batch-invariant kernels",
                arguments={"invariant": True})
        for p in found
        if p.name.startswith("exact/")
    ]  # fmt: skip


def choose(
    wanted: Iterable[Part], minutes: float, done: Collection[str] = (), vllm: bool = True
) -> tuple[list[Part], dict[str, str]]:
    """Parts to run now, in order, and why each of the others is left out.

    Arms of one cost curve are run together or not at all: one alone compares with nothing.

    Args:
        wanted: all parts.
        minutes: the budget of this run.
        done: names of parts that an earlier run finished; they cost nothing now.
        vllm: whether vLLM is to be measured.
    """
    chosen: list[Part] = []
    left: dict[str, str] = {}
    budget = minutes
    for group in _groups(wanted):
        open_ = [p for p in group if p.name not in done]
        if not vllm and any(p.vllm for p in open_):
            left |= {p.name: "needs vLLM, which is not installed here or was left out by --no-vllm" for p in open_}
            continue
        needed = sum(p.minutes for p in open_)
        if needed > budget:
            left |= {p.name: f"needs about {needed:.1f} minutes, and {budget:.1f} were left" for p in open_}
            continue
        chosen += open_
        budget -= needed
    return chosen, left


def _groups(wanted: Iterable[Part]) -> list[list[Part]]:
    groups: dict[str, list[Part]] = {}
    for part in wanted:
        key = part.name.rpartition("/")[0] if part.name.startswith("cost/") else part.name
        groups.setdefault(key, []).append(part)
    return list(groups.values())
