"""Rollouts of a fixed prompt set over the epochs of a drifting policy: no speculation, vLLM's own methods, rollspec.

Every arm does the same number of tokens: response lengths are recorded once per epoch, prompt and sample without
speculation, and replayed with `ignore_eos`. Temperature 1; weights of the next epoch are loaded into the live engines,
as a trainer does. vLLM's `ngram` gets the best of several K per batch size, found by a sweep; rollspec runs its default
preset everywhere. `perfect` is not a method but the limit: a drafter that is always right and free.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.drift import Drift, drift
from benchmarks.engines import Arm, Engine, Work, idle_cores
from benchmarks.harness import pin, provenance, save
from benchmarks.rollout_table import summarise, table

BATCHES = (1, 8, 32, 64)
SWEEP = {"ngram": (2, 4, 8), "perfect": (4, 8, 16, 32)}
EPOCHS = 4
MAX_LEN = 704
PROMPTS, SAMPLES = 8, 8
INSTRUCTIONS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number, and explain how it works.",
    "A train goes 60 km in 45 minutes. How fast is it in km per hour? Show each step.",
    "List ten things to pack for a week in the mountains.",
    "Rewrite this sentence in a friendly tone: The report is late and has to be sent today.",
    "Tell a short story about a lighthouse keeper and a lost boat.",
    "Compare cats and dogs as pets in a table with three rows.",
    "Summarise in one paragraph how plants make sugar from light.",
)
"""Prompts of a model that comes with none."""
PROMPTS_AT_1 = 2  # every step serves one request there: whole groups, but fewer
FULL = 64  # tokens per request where the batch is to stay full


def arm(method: str, k: int = 0) -> Arm:
    """An arm by name: `none`, `rollspec`, vLLM's `ngram` with K, or `perfect`, whose K drafts are all accepted."""
    if method == "none":
        return Arm("none")
    if method == "rollspec":
        return Arm("rollspec", rollspec="default")
    least = 1 if method == "perfect" else 2  # the perfect drafter always finds something to draft
    lookup = {"method": "ngram_gpu", "prompt_lookup_min": least, "prompt_lookup_max": 5}
    return Arm(f"{method} K={k}", speculative=lookup | {"num_speculative_tokens": k}, accept_all=method == "perfect")


class Load:
    """The requests of each epoch: which prompts, how long, in which order; no weights ("") where they stay the same."""

    def __init__(self, policy: Drift, prompts: list[list[int]], weights: list[str], seed: int = 0) -> None:
        self.policy, self.weights = policy, weights
        self.order = list(range(len(prompts) * SAMPLES))
        random.Random(seed).shuffle(self.order)  # siblings start apart, as in a real batch
        self.prompts = [prompts[i // SAMPLES] for i in self.order]
        self.lengths: list[list[int]] = []

    def record(self, engine: Engine) -> None:
        """Lengths of every epoch's responses, by an engine without speculation."""
        for version, weights in enumerate(self.weights):
            self.lengths.append(engine.run(Work(self.prompts, None, 64, version, weights))["lengths"])

    def epochs(self, engine: Engine, batch: int, count: int | None = None) -> list[dict[str, Any]]:
        """Run the first `count` epochs in turn, starting without a history."""
        some = [j for j, i in enumerate(self.order) if batch > 1 or i // SAMPLES < PROMPTS_AT_1]
        return [
            engine.run(Work([self.prompts[j] for j in some], [self.lengths[e][j] for j in some], batch, e, w, e == 0))
            for e, w in enumerate(self.weights[:count])
        ]

    def full(self, engine: Engine, batch: int) -> dict[str, Any]:
        """Responses of one length, so that the batch stays full: for the share of a step that drafting takes."""
        return engine.run(Work(self.prompts[:batch], [FULL] * batch, batch, len(self.weights), self.weights[-1]))

    def warm(self, engine: Engine) -> Engine:
        """Compile and touch everything once."""
        engine.run(Work(self.prompts, [24] * len(self.prompts), 64, 0))
        return engine


def first_prompts(policy: Drift, count: int) -> list[list[int]]:
    """Token ids of the job's first prompts; of `INSTRUCTIONS` where the policy is of no job."""
    import pandas as pd
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(policy.model)
    if policy.prompts:
        chats = [list(row) for row in pd.read_parquet(policy.prompts).prompt[:count]]
    else:
        chats = [[{"role": "user", "content": text}] for text in INSTRUCTIONS[:count]]
    if not tokenizer.chat_template:  # a base model
        return [tokenizer.encode(chat[-1]["content"]) for chat in chats]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def sweep(
    load: Load, batches: tuple[int, ...], quick: bool, console: Console
) -> dict[str, dict[str, dict[str, float]]]:
    """Seconds of the second epoch (it has a history) by method, batch size and K."""
    out: dict[str, dict[str, dict[str, float]]] = {}

    for method, ks in SWEEP.items():
        for k in ks[1:2] if quick else ks:
            console.print(f"sweep {method} K={k}")
            engine = Engine(arm(method, k), load.policy.model, MAX_LEN)
            try:
                load.warm(engine)
                for batch in batches:
                    seconds = load.epochs(engine, batch, 2)[-1]["seconds"]
                    out.setdefault(method, {}).setdefault(str(batch), {})[str(k)] = seconds
            finally:
                engine.close()
    return out


def run(
    quick: bool = False,
    rounds: int = 2,
    batches: tuple[int, ...] = BATCHES,
    epochs: int | None = None,
    model: Path | None = None,
    out: Path | None = None,
) -> Path:
    """The whole benchmark; prints tables and writes JSON. `quick` only shows that it runs.

    With a `model`, its weights stay the same in every epoch: there are no checkpoints of it over time.
    """
    pin()
    console = Console(stderr=True)
    began, clock = provenance(), time.monotonic()
    if model:
        policy = Drift(str(model), "", [""] * (epochs or EPOCHS), "the same weights in every epoch")
    else:
        console.print("checkpoints of the demo job (made once, minutes)")
        policy = drift()
    if quick:
        batches, rounds, epochs = tuple(b for b in batches if b == 8) or batches[:1], 1, 2
    load = Load(policy, first_prompts(policy, 2 if quick else PROMPTS), policy.weights[:epochs])
    live: dict[str, Engine] = {}
    results: dict[str, Any] = {}
    try:
        for name in ("none", "rollspec"):
            console.print(f"start {name}")
            live[name] = Engine(arm(name), policy.model, MAX_LEN)
        load.warm(live["none"])
        load.record(live["none"])
        load.warm(live["rollspec"])
        idle = idle_cores(list(live.values()))
        swept = sweep(load, batches, quick, console)
        for batch in sorted(batches):
            best = {m: int(min(swept[m][str(batch)], key=swept[m][str(batch)].__getitem__)) for m in swept}
            arms = [arm("none"), arm("ngram", best["ngram"]), arm("rollspec")]
            for name in [n for n in live if n not in {a.name for a in arms}]:
                live.pop(name).close()
            for a in arms:
                if a.name not in live:
                    console.print(f"start {a.name}")
                    live[a.name] = load.warm(Engine(a, policy.model, MAX_LEN))
            runs: dict[str, list[list[dict[str, Any]]]] = {a.name: [] for a in arms}
            for r in range(rounds):
                for a in arms if r % 2 == 0 else reversed(arms):
                    runs[a.name].append(load.epochs(live[a.name], batch))
                    total = sum(x["seconds"] for x in runs[a.name][-1])
                    console.print(f"batch {batch} round {r + 1}/{rounds} {a.name}: {total:.1f} s")
            summary = summarise(runs) | {
                "perfect_drafter": {
                    "k": best["perfect"],
                    "seconds": swept["perfect"][str(batch)][str(best["perfect"])],
                },
                "full_batch": load.full(live["rollspec"], batch),
                "runs": runs,
            }
            results[str(batch)] = summary
            console.print(table(batch, summary))
    finally:
        for engine in live.values():
            engine.close()
    flat = sorted(n for one in load.lengths for n in one)
    result = {
        "benchmark": "rollout",
        "provenance": began,
        "finished": {"load": provenance()["load"], "seconds": time.monotonic() - clock},
        "policy": {"model": policy.model, "made_by": policy.made_by, "epochs": len(load.weights)},
        "requests": len(load.prompts),
        "requests_at_batch_1": PROMPTS_AT_1 * SAMPLES,
        "lengths": {f"p{q}": flat[len(flat) * q // 100] for q in (50, 90, 99)} | {"max": flat[-1]},
        "idle_cores": idle,
        "sweep_seconds": swept,
        "batches": results,
    }
    return save("rollout" + ("-quick" if quick else ""), result, out)
