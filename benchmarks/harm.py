"""Do no harm: rollspec where there is nothing to gain, at a batch of 64, from the first step of a job on.

    unpredictable   the model with its logits flattened, temperature 1, fresh prompts: nothing can be guessed
    useless         the model as it is, and a drafter that says random tokens and claims to be sure of them

The model is the demo's policy, or one that is given. Two live engines, one without rollspec and one with its defaults,
do the same job epoch by epoch in turn. Each round rollspec starts knowing nothing, so what it spends on finding out
counts.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks import probes
from benchmarks.drift import CACHE, Drift
from benchmarks.engines import Arm, Engine, Work, idle_cores
from benchmarks.harness import QUICK, pin, provenance, ratio, save, verdict
from benchmarks.rollout import PROMPTS, SAMPLES, first_prompts
from examples.demo.job import JobSettings, prepare_assets
from rollspec.errors import RollspecError

BATCH = PROMPTS * SAMPLES
LENGTH = 128  # tokens of every response, so that the batch stays full
EPOCHS = 4
ROUNDS = 10
MAX_LEN = 384
FLATTEN = 0.02  # what the final norm, and with it every logit, is multiplied by
GOAL = 1.02
SCENARIOS = ("unpredictable", "useless")


NORM = "model.norm.weight"


def norms(model: str, folder: Path) -> tuple[Path, Path]:
    """Two files with the model's final norm: scaled down (nearly the same chance for every token), and as it is.

    The rest of the weights is in the engine and stays there, in however many files the checkpoint has them.

    Raises:
        RollspecError: the model has no norm of that name.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    for shard in sorted(Path(model).glob("*.safetensors")):
        with safe_open(str(shard), "pt") as weights:
            if NORM in weights.keys():  # noqa: SIM118 - it is no mapping
                norm = weights.get_tensor(NORM)
                break
    else:
        raise RollspecError(f"rollspec: --model {model} has no {NORM} to flatten its logits by; give another model.")
    flat, sharp = folder / "flat.safetensors", folder / "sharp.safetensors"
    save_file({NORM: norm * FLATTEN}, str(flat))
    save_file({NORM: norm}, str(sharp))
    return flat, sharp


class Job:
    """The epochs of one scenario: the same for both engines of a round."""

    def __init__(
        self, scenario: str, prompts: list[list[int]], weights: str, vocabulary: int, length: int, seed: int
    ) -> None:
        self.scenario, self.weights, self.length = scenario, weights, length
        self._prompts, self._vocabulary = prompts, vocabulary
        self._rng = random.Random(seed)

    def work(self, epoch: int) -> Work:
        """`BATCH` responses of one length; fresh random prompts where nothing is to repeat."""
        prompts = self._prompts
        if self.scenario == "unpredictable":
            prompts = [[self._rng.randrange(3, self._vocabulary) for _ in p] for p in prompts]
        return Work(prompts, [self.length] * len(prompts), len(prompts), epoch, self.weights)

    def start(self, engine: Engine) -> None:
        """rollspec begins a job: nothing learned, nothing remembered."""
        engine.call(probes.become, {"preset": "default"})
        if self.scenario == "useless":
            engine.call(probes.useless)


def summarise(runs: dict[str, list[list[dict[str, Any]]]]) -> dict[str, Any]:
    """rollspec / none by whole jobs (above 1: slower), by first epochs, and what rollspec did."""

    def seconds(name: str, epochs: slice) -> list[float]:
        return [sum(e["seconds"] for e in one[epochs]) for one in runs[name]]

    whole = ratio(seconds("rollspec", slice(None)), seconds("none", slice(None)))
    pairs = [[e["seconds"] for one in runs[name] for e in one] for name in ("rollspec", "none")]
    own = [e for one in runs["rollspec"] for e in one]
    plays: dict[str, int] = defaultdict(int)
    for e in own:
        for arm, n in (e.get("plays") or {}).items():
            plays[arm] += n
    ceilings = [e["ceiling"] for e in own if e.get("ceiling") is not None]
    total = {k: sum(e.get(k) or 0 for e in own) for k in ("drafted", "accepted", "tokens", "alarms")}
    spent = {k: sum(e.get(k) or 0.0 for e in own) for k in ("propose_seconds", "tuner_seconds", "seconds")}
    return {
        "rollspec_over_none": asdict(whole),
        "epochs": asdict(ratio(*pairs)),
        "first_epoch": asdict(ratio(seconds("rollspec", slice(1)), seconds("none", slice(1)))),
        "goal": GOAL,
        "verdict": verdict(whole, GOAL),
        **total,
        **spent,
        "plays": dict(plays),
        "ceiling": sum(ceilings) / len(ceilings) if ceilings else None,
        "drafters_off": sorted({d for e in own for d in e.get("drafters_off") or ()}),
        "faults": {cause: n for e in own for cause, n in (e.get("faults") or {}).items()},
    }


def table(results: dict[str, dict[str, Any]]) -> Table:
    """Both scenarios for people."""
    t = Table(title=f"nothing to gain, batch {BATCH}: time with rollspec's defaults over that without rollspec")
    columns = ("scenario", "ratio", "95 % interval", "first epoch", "E[max p]", "drafted", "accepted", "host", "tuner",
               "alarms", "played")  # fmt: skip
    for column in columns:
        t.add_column(column, justify="left" if column in ("scenario", "played") else "right")
    for name, r in results.items():
        s, steps = r["rollspec_over_none"], max(sum(r["plays"].values()), 1)
        most = sorted(r["plays"].items(), key=lambda p: -p[1])[:3]
        t.add_row(
            name,
            f"{s['median']:.3f}",
            f"{s['low']:.3f}-{s['high']:.3f}",
            f"{r['first_epoch']['median']:.3f}",
            f"{r['ceiling']:.3f}" if r["ceiling"] is not None else "-",
            f"{r['drafted']:,.0f}",
            f"{r['accepted']:,.0f}",
            f"{r['propose_seconds'] / r['seconds']:.1%}",
            f"{r['tuner_seconds'] / r['seconds']:.2%}",
            f"{r['alarms']}",
            " ".join(f"{a}:{n / steps:.0%}" for a, n in most),
        )
    t.caption = f"goal at most {GOAL:g}: " + ", ".join(f"{name} {r['verdict']}" for name, r in results.items())
    return t


@contextlib.contextmanager
def awake(engine: Engine) -> Iterator[None]:
    """Its processes run for as long as this lasts, and are halted after it."""
    engine.resume()
    yield
    engine.suspend()


def measure(
    scenario: str, engines: dict[str, Engine], make: Any, rounds: int, epochs: int, progress: Progress
) -> dict[str, list[list[dict[str, Any]]]]:
    """Rounds of both engines, epoch by epoch in turn, whose order changes every time."""
    task = progress.add_task(scenario, total=rounds * epochs)
    runs: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in engines}
    names: Sequence[str] = list(engines)
    for r in range(rounds):
        job: Job = make(scenario, r)
        with awake(engines["rollspec"]):
            job.start(engines["rollspec"])
        for name in names:
            runs[name].append([])
        for epoch in range(epochs):
            work = job.work(epoch)
            for name in names if (r + epoch) % 2 == 0 else names[::-1]:
                with awake(engines[name]):
                    runs[name][-1].append(engines[name].run(work))
            progress.advance(task)
        own, other = (sum(e["seconds"] for e in runs[name][-1]) for name in ("rollspec", "none"))
        progress.console.print(f"{scenario}, job {r + 1} of {rounds}: {own / other:.3f} ({own:.0f} s to {other:.0f} s)")
    return runs


def run(quick: bool = False, rounds: int = ROUNDS, model: Path | None = None, out: Path | None = None) -> Path:
    """Both scenarios; prints the table and writes JSON. `quick` only shows that it runs."""
    pin(apart=True)
    console = Console(stderr=True)
    began, clock = provenance(), time.monotonic()
    if model:
        policy = Drift(str(model), "", [], "")
    else:
        assets = prepare_assets(JobSettings(), CACHE / "grpo_arithmetic")
        policy = Drift(assets.model, assets.train, [], "")
    one = first_prompts(policy, PROMPTS)
    prompts = [p for p in one for _ in range(SAMPLES)]
    rounds, epochs, length = (2, 2, 24) if quick else (rounds, EPOCHS, LENGTH)
    engines: dict[str, Engine] = {}
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="rollspec-harm-") as folder:
        flat, sharp = map(str, norms(policy.model, Path(folder)))
        vocabulary = _vocabulary(policy.model)

        def make(scenario: str, seed: int) -> Job:
            weights = flat if scenario == "unpredictable" else sharp
            return Job(scenario, prompts, weights, vocabulary, length, seed)

        try:
            for name in ("none", "rollspec"):
                console.print(f"start {name}")
                arm = Arm(name, rollspec="default" if name == "rollspec" else None)
                engines[name] = Engine(arm, policy.model, MAX_LEN, BATCH)
                for weights in (flat, sharp):
                    engines[name].run(Work(prompts, [24] * len(prompts), BATCH, 0, weights))
                engines[name].suspend()
            idle = idle_cores(list(engines.values()))
            with Progress(console=console, transient=True) as progress:
                for scenario in SCENARIOS:
                    runs = measure(scenario, engines, make, rounds, epochs, progress)
                    results[scenario] = summarise(runs) | {"runs": runs}
        finally:
            for engine in engines.values():
                engine.resume()
                engine.close()
    if quick:
        console.print(QUICK)
    console.print(table(results))
    result = {
        "benchmark": "harm",
        "provenance": began,
        "finished": {"load": provenance()["load"], "seconds": time.monotonic() - clock},
        "model": policy.model,
        "requests": BATCH,
        "tokens_per_request": length,
        "epochs": epochs,
        "rounds": rounds,
        "idle_cores": idle,
        "scenarios": results,
    }
    return save("harm" + ("-quick" if quick else ""), result, out)


def _vocabulary(model: str) -> int:
    from benchmarks.cost import limits

    return limits(model)[0]
