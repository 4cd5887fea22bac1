"""Do no harm: rollspec where there is nothing to gain, at a full batch, from the first step of a job on.

    unpredictable   the model with its logits flattened, temperature 1, fresh prompts: nothing can be guessed
    useless         the model as it is, and a drafter that says random tokens and claims to be sure of them

The model is the demo's policy, or one that is given. Three live engines do the same job epoch by epoch in turn: without
rollspec, with its defaults (and a draft head, where one is given), and the null control, where it is on and drafts
nothing. Each round rollspec starts knowing nothing, so what it spends on finding out counts. Its time over the
control's is what drafting costs, without what else differs from the engine without rollspec.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks import probes
from benchmarks.control import NOTHING
from benchmarks.drift import CACHE, PROMPTS, SAMPLES, Drift, first_prompts
from benchmarks.engines import Arm, Engine, Work
from benchmarks.harness import QUICK, pin, provenance, ratio, save, verdict
from benchmarks.turns import idle_cores
from examples.demo.job import JobSettings, prepare_assets
from rollspec.errors import RollspecError

BATCH = PROMPTS * SAMPLES
REQUESTS = {1: 4, 2: 4, 4: 8, 8: 16}
"""Of an epoch at smaller batches; at others as many as the batch."""
LENGTH = 128  # tokens of every response, so that the batch stays full
EPOCHS = 4
ROUNDS = 10
MAX_LEN = 384
FLATTEN = 0.02  # what the final norm, and with it every logit, is multiplied by
GOAL = 1 / 0.99
ARMS = ("none", "rollspec", "rollspec, K = 0")
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
        self,
        scenario: str,
        prompts: list[list[int]],
        weights: str,
        vocabulary: int,
        length: int,
        seed: int,
        batch: int | None = None,
        source: dict[str, Any] | None = None,
    ) -> None:
        self.scenario, self.weights, self.length, self.batch = scenario, weights, length, batch or len(prompts)
        self._source = source or {"preset": "default"}
        self._prompts, self._vocabulary = prompts, vocabulary
        self._rng = random.Random(seed)

    def work(self, epoch: int) -> Work:
        """Responses of one length; fresh random prompts where nothing is to repeat."""
        prompts = self._prompts
        if self.scenario == "unpredictable":
            prompts = [[self._rng.randrange(3, self._vocabulary) for _ in p] for p in prompts]
        return Work(prompts, [self.length] * len(prompts), self.batch, epoch, self.weights)

    def start(self, engine: Engine) -> None:
        """rollspec begins a job: nothing learned, nothing remembered."""
        engine.call(probes.become, self._source)
        if self.scenario == "useless":
            engine.call(probes.useless)


def summarise(runs: dict[str, list[list[dict[str, Any]]]]) -> dict[str, Any]:
    """rollspec / none and rollspec / control by whole jobs (above 1: slower), in wall clock and CPU time, by first
    epochs, and what rollspec did.
    """

    def seconds(name: str, epochs: slice, key: str = "seconds") -> list[float]:
        return [sum(e[key] for e in one[epochs]) for one in runs[name]]

    pairs_of = {
        f"{a}_over_{b}{by}": ratio(seconds(an, slice(None), key), seconds(bn, slice(None), key))
        for a, an, b, bn in (
            ("rollspec", "rollspec", "none", "none"),
            ("control", ARMS[2], "none", "none"),
            ("rollspec", "rollspec", "control", ARMS[2]),
        )
        for by, key in (("", "seconds"), ("_cpu", "cpu_seconds"))
    }
    ours, none = ([e["seconds"] for one in runs[name] for e in one] for name in ("rollspec", "none"))
    own = [e for one in runs["rollspec"] for e in one]
    plays: dict[str, int] = defaultdict(int)
    for e in own:
        for arm, n in (e.get("plays") or {}).items():
            plays[arm] += n
    known = [e["max_acceptance"] for e in own if e.get("max_acceptance") is not None]
    total = {k: sum(e.get(k) or 0 for e in own) for k in ("drafted", "accepted", "tokens", "alarms")}
    spent = {k: sum(e.get(k) or 0.0 for e in own) for k in ("propose_seconds", "tuner_seconds", "seconds")}
    return {
        **{name: asdict(found) for name, found in pairs_of.items()},
        "epochs": asdict(ratio(ours, none)),
        "first_epoch": asdict(ratio(seconds("rollspec", slice(1)), seconds("none", slice(1)))),
        "goal": GOAL,
        "verdicts": {name: verdict(found, GOAL) for name, found in pairs_of.items() if name.startswith("rollspec")},
        **total,
        **spent,
        "plays": dict(plays),
        "max_acceptance": sum(known) / len(known) if known else None,
        "drafters_off": sorted({d for e in own for d in e.get("drafters_off") or ()}),
        "faults": {cause: n for e in own for cause, n in (e.get("faults") or {}).items()},
    }


def table(results: dict[str, dict[str, dict[str, Any]]]) -> Table:
    """Batches and scenarios for people."""
    t = Table(title="nothing to gain: time with rollspec over that without it, and over the null control")
    # What fits 80 columns; the JSON has the rest.
    columns = ("batch", "over\nnone", "by CPU", "over\ncontrol", "by CPU", "drafted", "host", "played")
    for column in columns:
        t.add_column(column, justify="left" if column in ("batch", "played") else "right")
    missed: dict[str, list[str]] = {}
    for batch, scenarios in results.items():
        for name, r in scenarios.items():
            steps = max(sum(r["plays"].values()), 1)
            most = sorted(r["plays"].items(), key=lambda p: -p[1])[:3]
            shown = [r[f"rollspec_over_{other}{by}"] for other in ("none", "control") for by in ("", "_cpu")]
            for ratio_of, v in r["verdicts"].items():
                missed.setdefault(f"{ratio_of} {v}", []).append(f"{batch} {name}")
            t.add_row(
                f"{batch}\n{name}",
                *(f"{s['median']:.3f}\n{s['low']:.3f}-\n{s['high']:.3f}" for s in shown),
                f"{r['drafted']:,.0f}",
                f"{r['propose_seconds'] / r['seconds']:.1%}",
                "\n".join(f"{a}:{n / steps:.0%}" for a, n in most),
            )
    t.caption = f"goal at most {GOAL:.3f}\n" + "\n".join(f"{k}: {', '.join(v)}" for k, v in missed.items())
    return t


@contextlib.contextmanager
def awake(engine: Engine) -> Iterator[None]:
    """Its processes run for as long as this lasts, and are halted after it."""
    engine.resume()
    yield
    engine.suspend()


def measure(
    label: str, engines: dict[str, Engine], make: Callable[[int], Job], rounds: int, epochs: int, progress: Progress
) -> dict[str, list[list[dict[str, Any]]]]:
    """Rounds of all engines, epoch by epoch in turn, whose order changes every time."""
    task = progress.add_task(label, total=rounds * epochs)
    runs: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in engines}
    names: Sequence[str] = list(engines)
    for r in range(rounds):
        job = make(r)
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
        own, *others = (sum(e["seconds"] for e in runs[name][-1]) for name in ("rollspec", ARMS[0], ARMS[2]))
        said = " and ".join(f"{own / other:.3f}" for other in others)
        progress.console.print(f"{label}, job {r + 1} of {rounds}: {said} of none and control ({own:.0f} s)")
    return runs


def run(
    quick: bool = False,
    rounds: int = ROUNDS,
    model: Path | None = None,
    batches: Sequence[int] = (BATCH,),
    scenarios: Sequence[str] = SCENARIOS,
    head: Path | None = None,
    out: Path | None = None,
) -> Path:
    """Every batch size and scenario; prints the table and writes JSON after each. `quick` only shows that it runs."""
    pin(apart=True)
    console = Console(stderr=True)
    began, clock = provenance(), time.monotonic()
    if model:
        policy = Drift(str(model), "", [], "")
    else:
        assets = prepare_assets(JobSettings(), CACHE / "grpo_arithmetic")
        policy = Drift(assets.model, assets.train, [], "")
    one = first_prompts(policy, PROMPTS)
    rounds, epochs, length = (2, 2, 24) if quick else (rounds, EPOCHS, LENGTH)
    source: dict[str, Any] = {"preset": "default"}
    if head:
        source |= {"proposal.drafters": ["suffix", "eagle3"], "proposal.head.model": str(head)}
    configurations = dict(zip(ARMS, (None, source, NOTHING), strict=True))
    engines: dict[str, Engine] = {}
    results: dict[str, dict[str, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="rollspec-harm-") as folder:
        flat, sharp = map(str, norms(policy.model, Path(folder)))
        vocabulary = _vocabulary(policy.model)
        try:
            for name, rollspec in configurations.items():
                console.print(f"start {name}", highlight=False)
                engines[name] = Engine(Arm(name, rollspec=rollspec), policy.model, MAX_LEN, BATCH)
                for weights in (flat, sharp):
                    engines[name].run(Work(one * SAMPLES, [24] * BATCH, BATCH, 0, weights))
                engines[name].suspend()
            idle = idle_cores(list(engines.values()))
            with Progress(console=console, transient=True, refresh_per_second=1) as progress:
                for batch, scenario in ((b, s) for b in batches for s in scenarios):
                    prompts = [one[i % len(one)] for i in range(REQUESTS.get(batch, batch))]
                    weights = flat if scenario == "unpredictable" else sharp

                    def make(
                        seed: int, batch: int = batch, scenario: str = scenario, weights: str = weights,
                        prompts: list[list[int]] = prompts,
                    ) -> Job:  # fmt: skip
                        return Job(scenario, prompts, weights, vocabulary, length, seed, batch, source)

                    runs = measure(f"batch {batch}, {scenario}", engines, make, rounds, epochs, progress)
                    results.setdefault(str(batch), {})[scenario] = summarise(runs) | {"runs": runs}
                    result = {
                        "benchmark": "harm",
                        "provenance": began,
                        "finished": {"load": provenance()["load"], "seconds": time.monotonic() - clock},
                        "model": policy.model,
                        "head": str(head) if head else None,
                        "tokens_per_request": length,
                        "epochs": epochs,
                        "rounds": rounds,
                        "idle_cores": idle,
                        "batches": results,
                    }
                    path = save("harm" + ("-quick" if quick else ""), result, out)
        finally:
            for engine in engines.values():
                engine.resume()
                engine.close()
    if quick:
        console.print(QUICK)
    console.print(table(results))
    return path


def _vocabulary(model: str) -> int:
    from benchmarks.cost import limits

    return limits(model)[0]
