"""What an engine step costs: an explicit sweep over running requests and draft lengths, all accepted and all rejected.

A drafter that knows what the target is going to say (greedy), or says something else, separates acceptance from cost;
vLLM's own `rejection_sample_method="synthetic"` does not run in its CPU kernels (0.29). Step times are the ones that
rollspec's tuner observes, taken where it takes them, and the cost model is fitted to them as it is online.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks import probes
from benchmarks.cost_table import Cell, curves, picture, summarise, table
from benchmarks.drift import CACHE
from benchmarks.engines import Arm, Engine, Work
from benchmarks.harness import QUICK, pin, provenance, save
from examples.demo.job import JobSettings, prepare_assets
from rollspec.errors import RollspecError
from rollspec.proposal.base import prompt_key
from rollspec.proposal.confidence import Confidence
from rollspec.tuning import store
from rollspec.tuning.cost import CostModel
from rollspec.tuning.tuner import Tuner

REQUESTS = (1, 2, 4, 8, 16, 32, 64)
DRAFTS = (0, 1, 2, 4, 8, 16)
STEPS = 14  # per cell and round
SETTLE = 2  # of them, left out of a cell's time; the cost model observes all
ROUNDS = 3
PROMPT = 16  # tokens; the grid's contexts are short
CONTEXT_REQUESTS, CONTEXT_DRAFTS = (1, 8, 32), (0, 4)
CONTEXT_SHARES = (0.4, 0.8)  # of the longest context, for the cells over context
MAX_LEN = 2048
LEAST_LEN = PROMPT + (max(DRAFTS) + 1) * (STEPS + 1)


@dataclass(frozen=True)
class Spot:
    """One cell of the sweep: `all_accepted` says whether drafts are accepted, None where there are none."""

    requests: int
    k: int
    all_accepted: bool | None
    prompt: int = PROMPT

    @property
    def length(self) -> int:
        """Tokens per request that make `STEPS` steps with whole drafts, and the one that the prompt's step samples.

        Drafts end one token before their request does, so where none is accepted the last `k` steps have shorter ones.
        """
        return 1 + STEPS * (1 + self.k) if self.all_accepted else 1 + STEPS + self.k


def grid(requests: Sequence[int], drafts: Sequence[int], prompt: int = PROMPT) -> Iterator[Spot]:
    """All cells of requests x drafts."""
    for b in requests:
        for k in drafts:
            yield from (Spot(b, k, accepted, prompt) for accepted in ((True, False) if k else (None,)))


class Sweep:
    """One engine, its prompts and what it says to them, and the steps it took."""

    def __init__(self, engine: Engine, spots: Sequence[Spot], vocabulary: int, seed: int = 0) -> None:
        self.engine, self.spots = engine, spots
        self.rounds: list[list[probes.Step]] = []
        self.cells: list[list[Cell]] = []
        self._rng = random.Random(seed)
        self._prompts: dict[int, list[list[int]]] = {}
        self._answers: dict[str, list[int]] = {}
        engine.call(probes.watch)
        for length in sorted({s.prompt for s in spots}):
            here = [s for s in spots if s.prompt == length]
            prompts = [
                [self._rng.randrange(vocabulary) for _ in range(length)] for _ in range(max(s.requests for s in here))
            ]
            self._prompts[length] = prompts
            texts = self._run(prompts, max(s.length for s in here), 0, texts=True)["texts"]
            self._answers |= {prompt_key(p): text for p, text in zip(prompts, texts, strict=True)}
        engine.call(probes.steps)  # compiles and first touches

    def _run(
        self, prompts: list[list[int]], length: int, k: int, accepted: bool = True, texts: bool = False
    ) -> dict[str, Any]:
        self.engine.call(probes.know, self._answers, k, accepted)
        return self.engine.run(Work(prompts, [length] * len(prompts), len(prompts), 0, temperature=0.0, texts=texts))

    def round(self) -> Iterator[None]:
        """Every cell once, in an order of its own; yields after each."""
        observed: list[probes.Step] = []
        cells = []
        for spot in self._rng.sample(self.spots, len(self.spots)):
            done = self._run(
                self._prompts[spot.prompt][: spot.requests], spot.length, spot.k, spot.all_accepted is True
            )
            steps: list[probes.Step] = self.engine.call(probes.steps)
            observed += steps
            tokens = spot.requests * (1 + spot.k)
            whole = [s for s in steps if s[0] == tokens and s[3] == spot.requests][SETTLE:]
            if len(whole) >= 3:
                seconds = [s[1] for s in whole]
                accepted = done["accepted"] / done["drafted"] if done["drafted"] else None
                context_tokens = statistics.mean(s[2] for s in whole)
                cells.append(
                    Cell(
                        spot.requests,
                        spot.k,
                        spot.all_accepted,
                        spot.prompt,
                        context_tokens,
                        statistics.median(seconds),
                        accepted,
                    )
                )
            yield
        self.rounds.append(observed)
        self.cells.append(cells)


def fit(rounds: Sequence[Sequence[probes.Step]]) -> CostModel:
    """The cost model after all steps in the order they came, as in an engine."""
    model = CostModel()
    for steps in rounds:
        for step in steps:
            model.observe(*step)
    return model


def keep(folder: Path, model: CostModel, machine: dict[str, Any]) -> Path:
    """Store the fit where a job with `history.dir` = `folder` starts from it; what else is stored there is kept.

    Raises:
        HistoryError: the folder cannot be written, or its file cannot be read.
    """
    from rollspec.config import RollspecConfig

    tuning, _ = store.load(folder, machine)
    tuning = tuning or {"confidence": Confidence().state()}
    if "tuner" not in tuning:
        config = RollspecConfig.load("default", env={})
        tuning["tuner"] = Tuner(config.tuning, config.proposal.k_max, config.proposal.drafters).state()
    tuning["tuner"]["cost"] = model.state()
    return store.save(folder, tuning, machine)


def limits(model: str) -> tuple[int, int]:
    """Vocabulary and longest context of the checkpoint in the folder `model`.

    Raises:
        RollspecError: it is not there, or too short for the sweep.
    """
    path = Path(model) / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise RollspecError(f"rollspec: --model {model} has no readable config.json ({e}); give a checkpoint.") from e
    config = config.get("text_config", config)
    try:
        vocabulary, longest = int(config["vocab_size"]), int(config.get("max_position_embeddings", MAX_LEN))
    except (KeyError, TypeError, ValueError) as e:
        raise RollspecError(f"rollspec: {path} names no vocab_size; give the checkpoint of a language model.") from e
    if longest < LEAST_LEN:
        raise RollspecError(f"rollspec: {path} has a context of {longest} tokens, and the sweep needs {LEAST_LEN}.")
    return vocabulary, min(longest, MAX_LEN)


def run(
    quick: bool = False,
    rounds: int = ROUNDS,
    model: Path | None = None,
    keep_in: Path | None = None,
    out: Path | None = None,
) -> Path:
    """Sweep, fit, print, draw, save. `quick` only shows that it runs."""
    pin(apart=True)
    console = Console(stderr=True)
    began, clock = provenance(), time.monotonic()
    path = str(model) if model else prepare_assets(JobSettings(), CACHE / "grpo_arithmetic").model
    vocabulary, longest = limits(path)
    if keep_in:
        store.load(keep_in, {})  # a file that cannot be used is refused now, not after the sweep
    requests, drafts = ((1, 4, 16), (0, 2, 8)) if quick else (REQUESTS, DRAFTS)
    spots = list(grid(requests, drafts))
    for share in CONTEXT_SHARES[-1:] if quick else CONTEXT_SHARES:
        spots += grid(CONTEXT_REQUESTS[:2] if quick else CONTEXT_REQUESTS, CONTEXT_DRAFTS, int(share * longest))
    rounds = 2 if quick else rounds
    k_max = max(drafts)
    arm = Arm(
        "cost",
        rollspec={
            "preset": "default",
            "proposal.k_max": k_max,
            "proposal.budget.rule": "fixed",
            "tuning": {"strategy": "static", "arms": [k_max], "guard": {"enabled": False}},
        },
    )
    engine = Engine(arm, path, longest, max(requests))
    try:
        machine = engine.call(probes.machine)
        sweep = Sweep(engine, spots, vocabulary)
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("sweeping", total=rounds * len(spots))
            for n in range(rounds):
                for _ in sweep.round():
                    progress.advance(task)
                progress.console.print(f"round {n + 1} of {rounds}: {time.monotonic() - clock:.0f} s", highlight=False)
    finally:
        engine.close()
    found = fit(sweep.rounds)
    before = fit(sweep.rounds[:-1]) if rounds > 1 else None
    result: dict[str, Any] = {
        "benchmark": "cost",
        "provenance": began,
        "finished": {"load": provenance()["load"], "seconds": time.monotonic() - clock},
        "model": path,
        "machine": machine,
        "steps": sum(map(len, sweep.rounds)),
        "rounds": rounds,
        **summarise(found, sweep.cells, before),
    }
    if quick:
        console.print(QUICK)
    for one in (table(result), curves(result)):
        console.print(one)
    written = save("cost" + ("-quick" if quick else ""), result, out)
    drawn = picture(found, result, written.with_suffix(".png"))
    console.print(f"drawn: {drawn}" if drawn else "no picture: matplotlib is not installed")
    if keep_in:
        stored = keep(keep_in, found, machine)
        console.print(f"the fit is in {stored}; a job with history.dir={keep_in} on this machine starts from it")
    return written
