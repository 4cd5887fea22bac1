"""Every result of a real language model in one call: what it needs is made first, and then each benchmark runs.

    rollspec bench real --work runs/real                      # hours; a later call resumes
    rollspec bench real --work runs/real --only peers,head    # these, whether they are stale or not

SmolLM2-135M is warmed up on the tasks of `examples/grpo_tasks`, further to where the policy of *epochs* moves, and gets
a small draft model, and a draft head that was trained on other prompts than those that it is measured on. Each
program's output goes to a log in the work folder. What was made stays there; a result that is not stale is not measured
again.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import stale
from benchmarks.harness import RESULTS, ROOT, provenance, save
from benchmarks.options import names
from examples.cache import built_once
from examples.grpo_tasks.prepare import prepare
from rollspec.errors import RollspecError

MINUTES = 120.0  # of `peers`, the longest
WARM, LATER, SMALL, WEAK, HEAD = 16.0, 6.0, 8.0, 13.0, 30.0  # minutes of training
LAYERS = 4  # of the small draft model
HEAD_SEED, SEED, ROWS = 7, 8, 512  # of the prompts that the head learns from, and of those that it is measured on
FILES = {
    "peers": "peers", "control": "control-smollm2", "head": "head", "tuner": "tuner-steady-smollm2",
    "harm": "harm-smollm2", "audit": "audit-smollm2", "traffic": "traffic-smollm2", "training": "training-smollm2",
    "make-head": "make-head-tasks",
}  # fmt: skip
"""What is measured, in this order, and the result of each."""


def run(work: Path, only: str | None = None, minutes: float = MINUTES) -> list[Path]:
    """Make what is missing, then measure; the results that were written.

    Args:
        only: benchmarks, separated by commas; None: those whose result is stale or not there.

    Raises:
        RollspecError: one failed; those after it ran.
    """
    wanted = names("--only", only, FILES)
    if only is None:
        known = stale.reasons()
        wanted = tuple(n for n in wanted if known is None or known.get(FILES[n], ["not there"]))
    real = Real(work.resolve())
    real.make()
    failed = []
    for name in wanted:
        try:
            real.measure(name, minutes)
        except RollspecError as e:
            failed.append(str(e))
    if failed:
        raise RollspecError("\n".join(failed))
    return [RESULTS / f"{FILES[name]}.json" for name in wanted]


@dataclass(frozen=True)
class Real:
    """A warmed up model, what it becomes later, a small draft model of it, and its head, in a folder."""

    work: Path

    def prompts(self, seed: int) -> str:
        """The Parquet file of a seed's prompts."""
        return prepare(self.work / "prompts", str(self.work / "warm"), seed, ROWS).train

    def make(self) -> None:
        """Whatever is not there yet."""
        warm = self.work / "warm"
        train = "-m", "examples.grpo_tasks.warm_up", "--model"
        for name, *rest in (
            ("warm", "smollm2", "--minutes", WARM),
            ("later", warm, "--minutes", LATER, "--seed", 1),
            ("small", warm, "--minutes", SMALL, "--seed", 2, "--layers", LAYERS),
        ):
            command = *train, *rest
            built_once(self.work, name, "config.json", partial(self._trained, name, command))
        made = self.work / "make-head"  # one training; its head is taken at two times
        head = (
            "-m", "drafter_online.cli", "make-head", "--model", warm, "--prompts", self.prompts(HEAD_SEED),
            "--threads", 1, "--max-tokens", 128, "--out", made, "--minutes",
        )  # fmt: skip
        for name, minutes in (("head-weak", WEAK), ("head", HEAD)):
            built_once(self.work, name, "config.json", partial(self._head, name, (*head, minutes), made))

    def _trained(self, name: str, command: Sequence[object], out: Path) -> None:
        self.call(name, *command, "--out", out)

    def _head(self, name: str, command: Sequence[object], made: Path, out: Path) -> None:
        began = provenance()  # its result is of this code, whenever it is taken
        self.call(name, *command)
        shutil.copytree(made, out, dirs_exist_ok=True)
        said = out / "make-head.json"
        save("make-head", {"benchmark": "make-head", "provenance": began, **json.loads(said.read_text())}, said)

    def measure(self, name: str, minutes: float) -> None:
        """Run a benchmark of `FILES`."""
        of, towards = ("--model", self.work / "warm"), ("--towards", self.work / "later")
        head, prompts = ("--head", self.work / "head"), ("--prompts", self.prompts(SEED))
        heads = (*head, "--head", self.work / "head-weak", "--head", self.work / "small")
        bench, out = ("-m", "rollspec.cli", "bench", name, *of), ("--out", RESULTS / f"{FILES[name]}.json")
        audit, traffic = ("-m", "benchmarks.audit_power", "engine", *of), self.work / "traffic"
        commands: dict[str, Sequence[object]] = {
            "peers": (*bench, *towards, *heads, *prompts, "--minutes", minutes, *out),
            "control": (*bench, "--batches", "4,64", *out),
            "head": (*bench, *head, *prompts, "--samples", 1, "--rounds", 2, "--seeds", "0,1,2", *out),
            "tuner": (*bench, *towards, *prompts, "--batches", "1,4,16,64", "--rounds", 1, *out),
            "harm": (*bench, "--batches", "1,4,16,64", "--scenarios", "unpredictable", "--rounds", 6, *out),
            "audit": (*audit, "--share", 0.005, "--faults", "none,Uniform", *out),
            "traffic": ("-m", "examples.production_traffic", *of, *head, "--seeds", 3, "--out", traffic),
            "training": (*bench, *out),
        }  # fmt: skip
        elsewhere = {"traffic": traffic / "summary.json", "make-head": self.work / "head" / "make-head.json"}
        if name in commands:
            self.call(name, *commands[name])
        if name in elsewhere:
            shutil.copy(elsewhere[name], RESULTS / f"{FILES[name]}.json")

    def call(self, name: str, *arguments: object) -> None:
        """Run a Python program with its output in a log.

        Raises:
            RollspecError: it failed.
        """
        log = self.work / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        print(f"{time.strftime('%H:%M:%S')} {name}: {log}", file=sys.stderr, flush=True)
        command = [sys.executable, *map(str, arguments)]
        with log.open("a") as file:
            status = subprocess.run(command, cwd=ROOT, stdout=file, stderr=file, check=False).returncode
        if status:
            raise RollspecError(f"rollspec: {name} ended with status {status}; the end of {log} says why.")
