"""Every published method on one engine, side by side: `rollspec bench peers`.

All arms do the same tokens of the same policy: lengths are recorded once without speculation and replayed. Engines of
a heat are alive at once and take turns, first one way round and then the other; those that wait are suspended. Every
seed has engines of its own: two of one arm differ by several percent for as long as they live, so that what one pair of
engines measures again and again says nothing of the next. Ratios are of turns that are close in time, and of seconds
that were measured. The JSON is written after every turn, and a call with the same code, model and settings on the same
kind of machine resumes from it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.drift import Drift, drift
from benchmarks.engines import Arm, Engine, Work
from benchmarks.harness import RESULTS, pin, provenance, save
from benchmarks.options import names
from benchmarks.peer_arms import NONE, OURS, PEERS, Chosen, trains
from benchmarks.peer_arms import chosen as of_names
from benchmarks.peer_bias import Ruled, distance, joined
from benchmarks.peer_load import EPOCHS, WORKLOADS, Load, drifting, load
from benchmarks.peer_plan import Cell, Costs, Heat, Plan, plan, room
from benchmarks.peer_store import FORMAT, begin, finished
from benchmarks.peer_table import sentences, summarise, table
from rollspec.errors import RollspecError

MINUTES, SEEDS = 120.0, 6
IDLE = 4.0
"""Seconds without requests after each work of a turn, for arms that train while an engine idles; no part of a turn."""
KEPT = ("seconds", "tokens", "steps", "drafted", "accepted", "after_end", "propose_share", "tuner_seconds", "by_source",
        "passes", "faults", "state", "plays", "kept", "cost")  # fmt: skip
"""What is kept of a work."""


@dataclass
class Peers:
    """One run: the result so far, and what is asked for."""

    policy: Drift
    load: Load
    chosen: Chosen
    seeds: int
    minutes: float
    settings: dict[str, Any]
    out: Path
    console: Console = field(default_factory=lambda: Console(stderr=True))
    engine: Callable[[Arm], Any] | None = None
    result: dict[str, Any] = field(default_factory=dict)

    def run(self) -> Path:
        """Measure what fits, keep what is done.

        Raises:
            RollspecError: not even one pair fits, or the engine without speculation does not run.
        """
        self.load.check(self.seeds, self.policy.model)
        began = time.monotonic()
        self.result = self._begin()
        self._time()
        found = self._plan(60 * self.minutes - (time.monotonic() - began))
        self.console.print(found.text(), highlight=False)
        self.result["left"] = self.chosen.left | found.left
        try:
            with Progress(
                TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed} of {task.total} turns"),
                TimeElapsedColumn(), console=self.console, transient=True,
            ) as bar:  # fmt: skip
                task = bar.add_task("", total=sum(h.turns for h in found.heats))
                for heat in found.heats:
                    if time.monotonic() - began > 60 * self.minutes:
                        self.result["left"] |= dict.fromkeys(heat.arms, "the minutes were over before it began")
                        continue
                    for _, cells in groupby(heat.cells, key=lambda cell: cell[0]):
                        self._turns(heat, list(cells), lambda text: bar.update(task, advance=1, description=text))
        finally:
            if self.result["turns"]:
                self._save()
        for name in [n for n in self.result["ruled"] if n in self.chosen.arms]:
            self.console.print(f"{name}: its distance from the policy", highlight=False)
            bias = float(self.chosen.arms[name].rollspec["reuse"]["bias"])  # type: ignore[index]
            epochs = {int(n): Ruled(**e) for n, e in self.result["ruled"][name].items()}
            now = distance(epochs, self.policy.model, self.load.weights, bias)
            known = self.result.setdefault("distance", {})
            known[name] = joined(known.get(name, ()), now)
            del self.result["ruled"][name]
            self._save()
        for workload, s in self.result["summary"]["workloads"].items():
            self.console.print(table(workload, s))
        for line in sentences(self.result["summary"]):
            self.console.print(line, highlight=False)
        return self.out

    # ---- what is known -----------------------------------------------------------------------------------------------

    def _begin(self) -> dict[str, Any]:
        """The result so far: of an earlier call on the same commit with the same settings, or an empty one."""
        mine = {
            "benchmark": "peers",
            "format": FORMAT,
            "provenance": provenance(),
            "policy": {"model": self.policy.model, "made_by": self.policy.made_by, "epochs": len(self.load.weights)},
            "settings": self.settings,
            "idle_seconds": IDLE,
            "lengths": {},
            "seconds": {},
            "start": [],  # seconds: an engine, its warm-up
            "turns": [],
            "ruled": {},  # of lossy arms, by epoch: what they said, until its distance from the policy is known
            "overlapping": {},  # by arm, as of its engine
            "failed": {},
            "left": {},
        }
        found = begin(mine, self.out, self.console)
        self.load.lengths = found["lengths"]
        return found

    def _time(self) -> None:
        """Seconds of a start, of warming up and of turns, and lengths of a seed, unless an earlier call has them."""
        if not self.result["start"] or any("0" not in self.load.lengths.get(w, ()) for w in self.load.workloads):
            none, *self.result["start"] = self._guarded(NONE, self._start, self.chosen.arms[NONE])
            try:
                self._record(none, 0)
            finally:
                none.close()

    def _plan(self, budget: float) -> Plan:
        (start, warm), seconds = self.result["start"], self.result["seconds"]
        arms = [name for name in self.chosen.arms if name not in self.result["failed"]]
        mine = {a: [w for w in self.load.workloads if not PEERS[a].only or w in PEERS[a].only] for a in arms}
        per_turn = IDLE * max(len(self.load.works(w, 0)) for w in self.load.workloads)
        return plan(
            [a for a in arms if mine[a]],
            mine,
            self.seeds,
            budget,
            Costs(start, warm, seconds, seconds),
            finished(self.result["turns"]),
            {(int(s), w) for w, by in self.load.lengths.items() for s in by},
            {a: per_turn for a in arms if trains(self.chosen.arms[a])},
            room(),
        )

    def _save(self) -> None:
        self.result["summary"] = summarise(self.result["turns"], self.load.lengths)
        self.result["finished"] = {"load": provenance()["load"]}
        save("peers", self.result, self.out)

    # ---- what runs ---------------------------------------------------------------------------------------------------

    def _start(self, arm: Arm) -> tuple[Any, float, float]:
        """The engine, warmed up and suspended, and the seconds that each took."""
        self.console.print(f"start {arm.name}", highlight=False)
        began = time.monotonic()
        engine = (self.engine or self._engine)(arm)
        try:
            ready = time.monotonic()
            engine.resume()
            for work in self.load.warm():
                engine.run(work)
            engine.suspend()
        except BaseException:
            engine.close()
            raise
        self.result["overlapping"][arm.name] = engine.overlapping
        return engine, ready - began, time.monotonic() - ready

    def _engine(self, arm: Arm) -> Engine:
        return Engine(arm, self.policy.model, self.load.longest)

    def _record(self, none: Any, seed: int) -> None:
        """Lengths of a seed's responses, without speculation; the first time how long a turn takes, too."""
        for name in self.load.workloads:
            known = self.load.lengths.setdefault(name, {})
            if str(seed) in known:
                continue
            none.resume()
            done = [none.run(work) for work in self.load.works(name, seed)]
            none.suspend()
            self.result["seconds"].setdefault(name, sum(d["seconds"] for d in done))
            known[str(seed)] = [
                d.get("lengths") or [WORKLOADS[name].most] * len(w.prompts)
                for d, w in zip(done, self.load.works(name, seed), strict=True)
            ]

    def _turns(self, heat: Heat, cells: Sequence[Cell], report: Callable[[str], None]) -> None:
        """Cells of one seed, by engines of their own. An arm that does not start, or ends, is named with its reason;
        the others continue.
        """
        live: dict[str, Any] = {}
        try:
            every = [n for n in (NONE, OURS, *heat.arms) if n not in self.result["failed"]]
            for name in every if cells[0][0] % 2 == 0 else reversed(every):
                if (started := self._guarded(name, self._start, self.chosen.arms[name])) is not None:
                    live[name] = started[0]
            for seed, workload in cells:
                self._record(live[NONE], seed)
                works, turn = self.load.works(workload, seed), {}
                mine = [n for n in every if n in live and (seed, workload) in heat.arms.get(n, heat.cells)]
                for name in mine if seed % 2 == 0 else reversed(mine):
                    report(f"{workload}, seed {seed}: {name}")
                    turn[name] = self._guarded(name, self._turn, name, live[name], works)
                    if turn[name] is None:
                        live.pop(name).close()
                arms = {name: runs for name, runs in turn.items() if runs is not None}
                self.result["turns"].append({"seed": seed, "workload": workload, "arms": arms})
                self._save()
        finally:
            for engine in live.values():
                engine.resume()
                engine.close()

    def _guarded(self, name: str, act: Callable[..., Any], *args: Any) -> Any:
        """What `act` returns; None where the arm's engine failed, which is noted. `none` may not fail."""
        try:
            return act(*args)
        except (RuntimeError, TimeoutError, OSError) as e:
            if name == NONE:
                raise RollspecError(f"rollspec: the engine without speculation failed ({e}).") from e
            self.result["failed"][name] = " ".join(str(e).split())
            self.console.print(f"{name} failed: {e}", highlight=False)
            return None

    def _turn(self, name: str, engine: Any, works: Sequence[Work]) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = []
        engine.resume()
        for work in works:
            done = engine.run(work)
            if any(done.get("ruled", ())):
                epochs, epoch = self.result["ruled"].setdefault(name, {}), str(len(out))
                here = Ruled(work.prompts, done["texts"], done["ruled"])
                epochs[epoch] = asdict(Ruled(**epochs[epoch]).and_(here) if epoch in epochs else here)
            out.append({k: done[k] for k in KEPT if k in done})
            if trains(self.chosen.arms[name]):
                time.sleep(IDLE)
        engine.suspend()
        return out


def run(
    model: Path | None = None,
    towards: Path | None = None,
    prompts: Path | None = None,
    heads: Sequence[Path] = (),
    arms: str | None = None,
    workloads: str | None = None,
    minutes: float = MINUTES,
    seeds: int = SEEDS,
    out: Path | None = None,
) -> Path:
    """The whole benchmark; prints the plan, tables and who wins, and writes JSON.

    Args:
        model: the target; None: the demo's policy with the checkpoints of its job.
        towards: a later checkpoint of `model`, which the policy of *epochs* moves to.
        seeds: most pairs of an arm at a workload.
    """
    chosen = of_names(arms, heads, model)
    wanted = names("--workloads", workloads, WORKLOADS)
    pin(apart=True)  # in every call: one core is the rollout device and the other the idle one, whatever trains
    settings = {"prompts": str(prompts) if prompts else None, "heads": [str(h) for h in heads]}
    if model is None and towards is not None:
        raise RollspecError("rollspec: --towards is a later checkpoint of --model, which is not given; give both.")
    policy = drift() if model is None else drifting(model, towards)
    found = load(dataclasses.replace(policy, weights=policy.weights[:EPOCHS]), prompts, wanted)
    if workloads is None and len(found.prompts) < 2:
        found.workloads = tuple(w for w in wanted if w != "shift")  # of one topic
    return Peers(policy, found, chosen, seeds, minutes, settings, out or RESULTS / "peers.json").run()
