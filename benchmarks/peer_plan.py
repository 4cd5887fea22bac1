"""Which arms and pairs of `rollspec bench peers` fit into the minutes.

Engines run in heats: so many as memory takes are alive at once and take turns, `none` and rollspec's default among
them, so that every arm has pairs of its own with both; for every seed they are started anew. A pair is one turn of an
arm and of `none` at a workload under one seed, close in time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.peer_arms import NONE, OURS
from rollspec.errors import RollspecError

ALIVE = 7
"""Engines at once at most; where memory is short, fewer."""
ENGINE_BYTES = 4.3e9
"""Of one engine with its three processes (4.1 GB with SmolLM2-135M). A trainer takes as much again."""
LEAST = 3
"""Pairs of an arm below which arms are left out rather than pairs."""
SLOWER = 1.15
"""How much longer an arm may take than `none`, for the plan."""

Cell = tuple[int, str]
"""(seed, workload): one turn of every arm of a heat."""


@dataclass(frozen=True)
class Costs:
    """Seconds: of starting an engine and of warming it up; of `none` at each workload, and of recording its lengths."""

    start: float
    warm: float
    turn: Mapping[str, float]
    record: Mapping[str, float]


@dataclass(frozen=True)
class Heat:
    """Arms that take turns with the two anchors, and the cells of each; the anchors do them all.

    Attributes:
        anchors: cells that the anchors do beside those.
    """

    arms: dict[str, tuple[Cell, ...]]
    anchors: tuple[Cell, ...] = ()

    @property
    def cells(self) -> tuple[Cell, ...]:
        """All of them, a seed's together, in the order of the workloads."""
        every = dict.fromkeys(c for some in (*self.arms.values(), self.anchors) for c in some)
        return tuple(sorted(every, key=lambda c: c[0]))

    @property
    def turns(self) -> int:
        """Of all engines, `none` and rollspec's default among them."""
        return 2 * len(self.cells) + sum(map(len, self.arms.values()))


@dataclass
class Plan:
    """What will run, in its order, and why the rest does not."""

    heats: list[Heat]
    seconds: float
    left: dict[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """For people, before it starts."""
        lines = [f"plan: {len(self.heats)} heats, about {self.seconds / 60:.0f} minutes"]
        for h in self.heats:
            seeds, workloads = sorted({s for s, _ in h.cells}), list(dict.fromkeys(w for _, w in h.cells))
            lines.append(f"  {', '.join(h.arms) or OURS}: {', '.join(workloads)}; seeds {', '.join(map(str, seeds))}")
        return "\n".join(lines + [f"  left out: {name}, {why}" for name, why in self.left.items()])


def room() -> int:
    """Engines that memory takes at once, of three at least."""
    import psutil

    return int(min(ALIVE, max(3, psutil.virtual_memory().available / ENGINE_BYTES)))


def estimate(heat: Heat, costs: Costs, recorded: Collection[Cell], training: Mapping[str, float]) -> float:
    """Seconds of a heat. `training`: seconds of idle time that an arm gets per workload, by arm."""
    turns = sum(costs.turn[w] * (1 + SLOWER) for _, w in heat.cells)
    turns += sum(costs.turn[w] * SLOWER + training.get(a, 0.0) for a, cells in heat.arms.items() for _, w in cells)
    recording = sum(costs.record[w] for s, w in heat.cells if (s, w) not in recorded)
    starts = (costs.start + costs.warm) * len({s for s, _ in heat.cells}) * (2 + len(heat.arms))
    return starts + turns + recording


def heats(
    arms: Sequence[str], workloads: Mapping[str, Sequence[str]], seeds: int, done: Mapping[str, Collection[Cell]],
    alive: int = ALIVE, training: Collection[str] = (),
) -> list[Heat]:  # fmt: skip
    """All that is missing. `workloads`: of each arm. `done`: cells that an arm has finished, by arm. `training`: arms
    with a trainer.

    rollspec's default is in every heat, and has one of its own where it alone lacks something.
    """
    missing = {
        name: tuple((s, w) for s in range(seeds) for w in workloads[name] if (s, w) not in done.get(name, ()))
        for name in arms
    }
    others = [name for name in arms if name not in (NONE, OURS) and missing[name]]
    out: list[Heat] = []
    room = 0
    for name in others:
        takes = 2 if name in training else 1
        if not out or takes > room:
            out.append(Heat({}))
            room = alive - 2
        out[-1].arms[name] = missing[name]
        room -= takes
    if left := tuple(c for c in missing.get(OURS, ()) if not any(c in h.cells for h in out)):
        out.insert(0, Heat({}, left))
    return out


def plan(
    arms: Sequence[str],
    workloads: Mapping[str, Sequence[str]],
    seeds: int,
    budget: float,
    costs: Costs,
    done: Mapping[str, Collection[Cell]],
    recorded: Collection[Cell] = (),
    training: Mapping[str, float] | None = None,
    alive: int = ALIVE,
) -> Plan:
    """As many pairs of every arm as `budget` (seconds) holds, up to `seeds` per workload; where there is no room for
    `LEAST` of each, fewer arms, the last ones of the table first.

    Raises:
        RollspecError: not even one pair of one arm fits.
    """

    def total(some: Sequence[Heat]) -> float:
        seen: set[Cell] = set(recorded)
        seconds = 0.0
        for h in some:
            seconds += estimate(h, costs, seen, training or {})
            seen.update(h.cells)
        return seconds

    first: list[Heat] = []
    for pairs in range(seeds, 0, -1):
        kept = list(arms)
        while True:
            first = heats(kept, workloads, pairs, done, alive, training or ())
            seconds = total(first)
            if seconds <= budget and (first or len(kept) == len(arms)):
                why = f"there is no room for its {pairs} pairs in the minutes given"
                return Plan(first, seconds, {a: why for a in arms if a not in kept})
            others = [a for a in kept if a not in (NONE, OURS) and _lacks(a, workloads[a], pairs, done)]
            if pairs > min(LEAST, seeds) or len(others) <= 1:
                break
            kept.remove(others[-1])
    raise RollspecError(
        f"rollspec: --minutes {budget / 60:.3g} is too small: one pair needs about {total(first) / 60:.1f}, after what "
        "was started; give more, or fewer --workloads."
    )


def _lacks(arm: str, workloads: Sequence[str], pairs: int, done: Mapping[str, Collection[Cell]]) -> bool:
    return any((s, w) not in done.get(arm, ()) for s in range(pairs) for w in workloads)
