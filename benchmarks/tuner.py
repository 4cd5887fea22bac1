"""The tuner on a moving batch: 64 requests that end one after the other until one is left, epoch after epoch of a
drifting policy, against every fixed draft length, published bandits and the oracle.

Lengths are fixed so that the batch halves every `HALF_LIFE` tokens; the requests that run longest by themselves get
the longest. Two real engines take turns, one without rollspec and one whose rollspec is made anew for each run under
another configuration: every arm starts without history and without a cost model, and what learning costs counts.

With `batches` the batch stays at one size, one after the other: the distance to the arm that was best there. The policy
is the demo's, whose job saved its checkpoints, or a model that is given, on its way to a later checkpoint of it.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import probes
from benchmarks.drift import MAX_LEN, PROMPTS, SAMPLES, Drift, drift, first_prompts
from benchmarks.engines import Arm, Engine, Work
from benchmarks.harness import QUICK, pin, provenance, save
from benchmarks.peer_load import drifting
from benchmarks.tuner_table import distance, distances, oracle_table, summarise, table
from benchmarks.turns import idle_cores
from rollspec.errors import RollspecError

FIXED = (1, 2, 4, 8, 16)
BANDITS = ("ucbspec", "exp3spec", "beg_mab", "thompson")
ARMS = ("none", *(f"K={k}" for k in FIXED), "goodput", *BANDITS, "hedge", "oracle")
"""In the order in which they take turns: the oracle's table comes from the first run of hedge."""
BATCH = PROMPTS * SAMPLES
HALF_LIFE = 48  # tokens in which the batch halves
ROUNDS = 3
EPOCHS = 4
STEADY = ("none", *(f"K={k}" for k in FIXED), "hedge")
"""The arms of a batch that stays."""
STEADY_TOKENS = 96
"""Of each of its responses."""


def configuration(name: str, ks: dict[int, int] | None = None) -> dict[str, Any]:
    """rollspec's configuration of an arm. `ks`: the oracle's draft length per batch size.

    `K=...` and the bandits verify all that was drafted, as their papers do; `goodput` is the budget alone, without a
    policy; `oracle` is hedge's setting with its strategy replaced by the arms that were best in hindsight.
    """
    base: dict[str, Any] = {"preset": "default"}
    plain = {"proposal.budget.rule": "fixed", "tuning.guard.enabled": False}
    if name.startswith("K="):
        return base | plain | {"tuning.strategy": "static", "tuning.arms": [int(name[2:])]}
    if name in BANDITS:
        return base | plain | {"tuning.strategy": name}
    if name == "goodput":
        return base | {"tuning.strategy": "static", "tuning.guard.enabled": False}
    if name == "oracle":
        rows = {str(b): k for b, k in (ks or {}).items()}
        return base | {"tuning.strategy": "table", "tuning.options": {"table": rows}, "tuning.guard.enabled": False}
    return base


def moving(natural: Sequence[int], half_life: int = HALF_LIFE) -> list[int]:
    """Lengths under which a batch that starts together halves every `half_life` tokens, one request left at the end.

    The order is that of `natural`, the lengths that the responses have by themselves: shape [requests], tokens.
    """
    n = len(natural)
    out = [0] * n
    for rank, i in enumerate(sorted(range(n), key=natural.__getitem__, reverse=True), 1):
        out[i] = round(half_life * (1.0 + math.log2(n / rank)))
    return out


class Load:
    """The requests of each epoch, in one order, and how long they get."""

    def __init__(self, policy: Drift, prompts: list[list[int]], weights: list[str], batch: int = 0) -> None:
        """`batch`: that stays; 0: one that falls, of all requests."""
        self.policy, self.weights, self.batch = policy, weights, batch or BATCH
        order = list(range(len(prompts) * SAMPLES))
        random.Random(0).shuffle(order)  # siblings start apart, as in a real batch
        if batch:  # a few times its size, where that is small
            order = order[: max(8, 4 * batch)]
        self.prompts = [prompts[i // SAMPLES] for i in order]
        self.lengths: list[list[int]] = [[STEADY_TOKENS] * len(order)] * len(weights) if batch else []

    def record(self, engine: Engine) -> None:
        """Lengths of every epoch's responses, by an engine without speculation."""
        for version, weights in enumerate(self.weights):
            self.lengths.append(engine.run(Work(self.prompts, None, BATCH, version, weights))["lengths"])

    def epochs(self, engine: Engine) -> list[dict[str, Any]]:
        """Run the epochs in turn, starting without a history."""
        return [
            engine.run(Work(self.prompts, self.lengths[e], self.batch, e, weights, e == 0))
            for e, weights in enumerate(self.weights)
        ]

    def warm(self, engine: Engine) -> Engine:
        """Compile and touch everything once."""
        engine.run(Work(self.prompts, [24] * len(self.prompts), BATCH, 0))
        return engine


def policy_of(
    model: Path | None, towards: Path | None, file: Path | None, epochs: int
) -> tuple[Drift, list[list[int]]]:
    """The policy by epoch, and `PROMPTS` prompts of it.

    Raises:
        RollspecError: a checkpoint or prompts are given without a model, or too few prompts.
        TrainingError: the file cannot be used.
    """
    if model is None:
        if given := towards or file:
            raise RollspecError(f"rollspec: {given} is of a --model, which is not given; give both.")
        policy = drift()
        return policy, first_prompts(policy, PROMPTS)
    from drafter_online import prompts

    found, _ = prompts.tokenized(prompts.read(file), model, MAX_LEN - max(STEADY_TOKENS, max(moving(range(BATCH)))))
    if len(found) < PROMPTS:
        raise RollspecError(f"rollspec: --prompts {file} has {len(found)} that fit, and {PROMPTS} are needed.")
    return drifting(model, towards, epochs), found[:PROMPTS]


def chosen(strategies: Sequence[str] | None) -> tuple[str, ...]:
    """The arms to run, in their order; `none` always among them, and hedge where the oracle is."""
    if strategies is None:
        return ARMS
    wanted = {"none", *strategies} | ({"hedge"} if "oracle" in strategies else set())
    return tuple(a for a in ARMS if a in wanted)


def turns(
    arms: Sequence[str], engines: dict[str, Engine], load: Load, rounds: int, console: Console
) -> tuple[dict[str, list[list[dict[str, Any]]]], dict[int, int]]:
    """What every arm's runs measured, by round and epoch, and the oracle's draft length per batch size.

    Raises:
        RollspecError: rollspec's engine left its tuner out.
    """
    runs: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in arms}
    ks: dict[int, int] = {}
    for r in range(rounds):
        # The first round keeps the order, for the oracle; then every other one is turned round.
        for name in arms if r % 2 == 0 else arms[::-1]:
            engine = engines["none" if name == "none" else "rollspec"]
            if name != "none":
                engine.call(probes.become, configuration(name, ks))
            runs[name].append(load.epochs(engine))
            if name == "hedge" and not ks:
                ks = oracle_table(runs[name][0])
                if not ks:
                    faults = runs[name][0][-1].get("faults") or "none counted"
                    raise RollspecError(f"rollspec: the tuner saw no step of its own run; faults: {faults}.")
            console.print(f"round {r + 1}/{rounds} {name}: {sum(e['seconds'] for e in runs[name][-1]):.2f} s")
    return runs, ks


def run(
    quick: bool = False,
    rounds: int = ROUNDS,
    strategies: Sequence[str] | None = None,
    out: Path | None = None,
    batches: Sequence[int] = (),
    model: Path | None = None,
    towards: Path | None = None,
    prompts: Path | None = None,
) -> Path:
    """The whole benchmark; prints the table and writes JSON. `quick` only shows that it runs.

    Args:
        batches: sizes that the batch stays at, one after the other; none: it falls from 64 to 1.
        model: None: the demo's policy, with the checkpoints of its job.
        towards: a later checkpoint of `model`; None: it does not move.
        prompts: of `model`; None: built-in instructions.
    """
    arms = chosen(strategies if strategies or not quick else ("K=4", "goodput", "thompson", "hedge", "oracle"))
    if batches:
        arms = tuple(a for a in STEADY if strategies is None or a in (*strategies, "none", "hedge"))
    pin(apart=True)
    console = Console(stderr=True)
    began, clock = provenance(), time.monotonic()
    rounds, epochs, half_life = (1, 2, 12) if quick else (rounds, EPOCHS, HALF_LIFE)
    if model is None:
        console.print("checkpoints of the demo job (made once, minutes)")
    policy, asked = policy_of(model, towards, prompts, epochs)
    weights = policy.weights[:epochs]
    load = Load(policy, asked, weights)
    engines: dict[str, Engine] = {}
    found: dict[str, Any] = {}
    try:
        for name in ("none", "rollspec"):
            console.print(f"start {name}")
            engines[name] = load.warm(
                Engine(Arm(name, rollspec="default" if name == "rollspec" else None), policy.model, MAX_LEN, BATCH)
            )
        idle = idle_cores(list(engines.values()))
        if batches:
            for batch in batches:
                console.print(f"batch {batch}", highlight=False)
                runs, _ = turns(arms, engines, Load(policy, asked, weights, batch), rounds, console)
                found[str(batch)] = {**distance(runs), "runs": runs}
        else:
            load.record(engines["none"])
            load.lengths = [moving(natural, half_life) for natural in load.lengths]
            runs, ks = turns(arms, engines, load, rounds, console)
    finally:
        for engine in engines.values():
            engine.close()
    result: dict[str, Any] = {
        "benchmark": "tuner",
        "provenance": began,
        "finished": {"load": provenance()["load"], "seconds": time.monotonic() - clock},
        "policy": {"model": policy.model, "made_by": policy.made_by, "epochs": len(weights)},
        "idle_cores": idle,
    }
    if batches:
        result |= {"tokens": STEADY_TOKENS, "batches": found}
        console.print(distances(result))
    else:
        result |= {
            "requests": BATCH,
            "half_life": half_life,
            "lengths": sorted(load.lengths[0]),
            "oracle_table": ks,
            "configurations": {n: configuration(n, ks) for n in arms if n != "none"},
            **summarise(runs),
            "runs": runs,
        }
        console.print(table(result))
    if quick:
        console.print(QUICK)
    return save("tuner" + ("-steady" if batches else "") + ("-quick" if quick else ""), result, out)
