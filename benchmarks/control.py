"""The null control: an engine with rollspec on and K = 0 against one without it. What differs is not drafting.

With a head: what training costs an engine that drafts. The same head in three engines, two of which record samples for
a trainer that never publishes: on a core of its own, and on the engine's while that has nothing to do, for which every
engine waits before each turn. Drafts are as long in all (K = 2) and the sampling is coupled, so texts and steps are the
same, and what differs is recording, sending, and who else computes. What the last of these costs on this machine, whose
cores share a cache and a memory, a stranger shows: another training on the trainer's core, while the engine that is not
trained has a further turn.

All run in vLLM's second model runner, schedule asynchronously and have the same patches. They decode the same requests
in turn, at a fixed length, and are started anew for every pair: of each start the median of its turns counts. Every
speed-up that is printed elsewhere is to be read beside these ratios.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.drift import CACHE
from benchmarks.engines import Arm, Engine, Work
from benchmarks.harness import ROOT, pin, provenance, ratio, save, verdict
from benchmarks.turns import alternate, anew, idle_cores
from examples.demo.job import JobSettings, prepare_assets
from rollspec.machine import TRAINER_CORES

BATCHES = (4, 32)
LENGTH = 96
HEAD_LENGTH = 32  # the same, with a head: turns are short, because the machine's speed changes
STARTS = 8
TURNS = 4  # of each engine
PAUSE = 2.0  # seconds before each turn in which an engine has nothing to do, where one trains then
GOAL = 0.02
"""How far from 1 the ratio of times may be."""
GOALS = {"dedicated": 0.01, "idle": 0.03}
"""The same, by how a head is trained."""
STRANGER = "another training on the other core"

NOTHING = {"preset": "default", "tuning.strategy": "static", "tuning.arms": [0]}
DRAFTING = NOTHING | {
    "tuning.arms": [2], "tuning.guard.enabled": False, "proposal.budget.rule": "fixed", "mode": "coupled",
    "proposal.drafters": ["eagle3"], "proposal.head.k_max": 2,
}  # fmt: skip
TRAINED = {"drafter.train_when": "always", "drafter.publish_every": 1_000_000}


def run(
    quick: bool = False,
    starts: int = STARTS,
    model: Path | None = None,
    head: Path | None = None,
    batches: Sequence[int] = (),
    out: Path | None = None,
) -> Path:
    """Print the ratios and save them; with `head`, those of training beside its engine. `batches`: `BATCHES` if none
    are given.
    """
    pin(apart=True)  # as `peers` and `harm`
    began = provenance()
    path = str(model) if model else prepare_assets(JobSettings(), CACHE / "grpo_arithmetic").model
    with tempfile.TemporaryDirectory(prefix="rollspec-control-", ignore_cleanup_errors=True) as folder:
        trainers = Path(folder) / "trainers"
        if head is None:
            arms = [Arm("off"), Arm("on, K = 0", rollspec=NOTHING)]
        else:
            both = DRAFTING | {"proposal.head.model": str(head)}
            arms = [Arm("not trained", rollspec=both)] + [
                Arm(mode, rollspec=both | TRAINED | {"drafter.mode": mode, "drafter.dir": str(trainers / mode)})
                for mode in GOALS
            ]
        batches = batches or (BATCHES[:1] if quick else BATCHES)
        length, pause = (HEAD_LENGTH, PAUSE) if head else (LENGTH, 0.0)
        found = measure(arms, path, batches, length, 1 if quick else starts, pause, trainers)
    if head is not None:  # what recording and sending cost: both sides have a training on the other core
        found["dedicated over a stranger"] = {
            batch: asdict(ratio(seconds, found["seconds"][STRANGER][batch]))
            for batch, seconds in found["seconds"]["dedicated"].items()
        }
    name = "control" + ("-head" if head else "") + ("-quick" if quick else "")
    result = {"benchmark": "control", "provenance": began, "finished": {"load": provenance()["load"]}, "model": path}
    return save(name, {**result, "head": head and str(head), "tokens_per_request": length, **found}, out)


class Stranger:
    """An engine that has nothing to do with a training that runs during its turns, on the other core."""

    def __init__(self, engine: Engine, model: str) -> None:
        self.arm, self._engine = Arm(STRANGER), engine
        given = json.dumps({"target": model, "size": 8192, "steps": 1_000_000})
        self._training = subprocess.Popen(
            ["taskset", "--cpu-list", os.environ[TRAINER_CORES], sys.executable, "-m", "benchmarks.training", given],
            cwd=ROOT, stdout=subprocess.DEVNULL,
        )  # fmt: skip

    def run(self, work: Work) -> dict[str, Any]:
        """The engine's turn."""
        return self._engine.run(work)

    def suspend(self) -> None:
        """Both."""
        self._training.send_signal(signal.SIGSTOP)
        self._engine.suspend()

    def resume(self) -> None:
        """Both."""
        if self._training.poll() is not None:
            raise RuntimeError("rollspec: the training beside the engine ended; its output is above.")
        self._training.send_signal(signal.SIGCONT)
        self._engine.resume()

    def end(self) -> None:
        """The training."""
        self._training.kill()
        self._training.wait()


def measure(
    arms: Sequence[Arm], model: str, batches: Sequence[int], length: int, starts: int, pause: float, trainers: Path
) -> dict[str, Any]:
    """Every arm's time over that of the first, by batch size, with verdicts; with a pause, that of a stranger, too."""
    console = Console(stderr=True)
    works = {batch: Work([[5, 6, 7, 8 + i] for i in range(batch)], [length] * batch, batch, 0) for batch in batches}
    trained, idle = dict.fromkeys((a.name for a in arms), 0.0), 0.0

    def measured(engines: list[Engine]) -> dict[str, dict[int, list[float]]]:
        nonlocal idle
        if pause:
            stranger = Stranger(engines[0], model)
            try:
                seconds = alternate([engines[0], stranger, *engines[1:]], works, TURNS, pause)
            finally:
                stranger.end()
        else:
            seconds = alternate(engines, works, TURNS)
        for e in engines:
            trained[e.arm.name] += e.cpu_seconds(trainer=True)
        idle = max(idle, idle_cores(engines))
        return seconds

    seconds = anew(starts, arms, model, 256, measured, trainers)
    first, *others = seconds
    found: dict[str, Any] = {"idle_cores": idle, "seconds": seconds, "trainer_cpu_seconds": trained}
    for name in others:
        ratios = {batch: ratio(seconds[name][batch], seconds[first][batch]) for batch in works}
        for batch, r in ratios.items():
            console.print(
                f"batch {batch}: time of {name!r} / {first!r}: {r.median:.4f} "
                f"(95 % interval {r.low:.4f}-{r.high:.4f}, {r.n} pairs)"
            )
        row: dict[str, Any] = {"on_over_off": {batch: asdict(r) for batch, r in ratios.items()}}
        if name != STRANGER:  # of which nothing is claimed
            goal = GOALS.get(name, GOAL)
            row |= {
                "at_most": {batch: verdict(r, 1 + goal) for batch, r in ratios.items()},
                "at_least": {batch: verdict(r, 1 - goal, most=False) for batch, r in ratios.items()},
            }
        found |= {name: row} if pause else row
    return found
