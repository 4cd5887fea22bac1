"""Rollouts of a fixed prompt set over the epochs of a drifting policy: no speculation, vLLM's own methods, rollspec.

Every arm does the same number of tokens: response lengths are recorded once from the first engine and replayed with
`ignore_eos`. Temperature 1; weights of the next epoch are loaded into the live engines, as a trainer does. vLLM's
`ngram` and `suffix` get the best of several K per batch size, found by a sweep; rollspec runs its default preset
everywhere.
"""

from __future__ import annotations

import random
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.drift import Drift, drift
from benchmarks.harness import Arm, Engine, Work, pin, provenance, ratio, save

BATCHES = (1, 8, 32, 64)
SWEEP = {"ngram": (2, 4, 8), "suffix": (2, 4, 8, 16)}
MAX_LEN = 704
PROMPTS, SAMPLES = 8, 8


def arm(method: str, k: int = 0) -> Arm:
    """An arm by name: `none`, `rollspec`, or vLLM's `ngram` and `suffix` with K."""
    if method == "none":
        return Arm("none")
    if method == "rollspec":
        return Arm("rollspec", rollspec="default")
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": k}
    if method == "ngram":
        config |= {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
    return Arm(f"{method} K={k}", speculative=config)


def workload(policy: Drift, quick: bool) -> tuple[list[list[int]], list[str]]:
    """Prompt tokens (each `SAMPLES` times) and the weights of each epoch."""
    import pandas as pd
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(policy.model)
    rows = list(pd.read_parquet(policy.prompts).prompt)[: 2 if quick else PROMPTS]
    prompts = [
        tokenizer.encode(tokenizer.apply_chat_template(list(r), add_generation_prompt=True, tokenize=False))
        for r in rows
    ]
    return [p for p in prompts for _ in range(SAMPLES)], policy.weights[: 2 if quick else None]


def record_lengths(policy: Drift, prompts: list[list[int]], seed: int) -> list[int]:
    """Response lengths of the starting policy, by Hugging Face's generate: the long tail that every arm replays."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(policy.model, dtype=torch.float32).eval()
    distinct = [p for i, p in enumerate(prompts) if i % SAMPLES == 0]
    out: list[int] = []
    with torch.no_grad():
        for p in distinct:
            ids = torch.tensor([p] * SAMPLES)
            got = model.generate(ids, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=512, pad_token_id=0)
            for row in got[:, len(p) :].tolist():
                out.append(row.index(2) + 1 if 2 in row else len(row))
    return out


def run(quick: bool = False, rounds: int = 2, batches: tuple[int, ...] = BATCHES, out: Path | None = None) -> Path:
    """The whole benchmark; prints tables and writes JSON. `quick` only shows that it runs."""
    pin()
    console = Console(stderr=True)
    began = provenance()
    console.print("checkpoints of the demo job (made once, minutes)")
    policy = drift()
    prompts, weights = workload(policy, quick)
    lengths = record_lengths(policy, prompts, seed=0)
    order = list(range(len(prompts)))
    random.Random(0).shuffle(order)  # siblings start apart, as in a real batch
    prompts, lengths = [prompts[i] for i in order], [lengths[i] for i in order]
    if quick:
        batches, rounds = tuple(b for b in batches if b in (8,)), 1

    def share(batch: int) -> int:
        # At batch 1 every step serves one request: an eighth of the work says the same in an eighth of the time.
        return max(8, len(prompts) // 8) if batch == 1 else len(prompts)

    def epochs(engine: Engine, batch: int, only: int | None = None) -> list[dict[str, Any]]:
        n = share(batch)
        return [
            engine.run(Work(prompts[:n], lengths[:n], batch, e, w, reset=e == 0)) for e, w in enumerate(weights[:only])
        ]

    sweep: dict[str, dict[str, dict[str, float]]] = {}
    best: dict[tuple[str, int], int] = {}
    for method, ks in SWEEP.items():
        for k in ks[:1] if quick else ks:
            console.print(f"sweep {method} K={k}")
            engine = Engine(arm(method, k), policy.model, MAX_LEN)
            try:
                engine.run(Work(prompts[:8], [24] * 8, 8, 0))  # warm-up
                for batch in batches:
                    # Two epochs: the second has a history to draft from.
                    seconds = epochs(engine, batch, 2)[-1]["seconds"]
                    sweep.setdefault(method, {}).setdefault(str(batch), {})[str(k)] = seconds
            finally:
                engine.close()
        for batch in batches:
            found = sweep[method][str(batch)]
            best[method, batch] = int(min(found, key=lambda k: found[k]))

    results: dict[str, Any] = {}
    live: dict[str, Engine] = {}
    try:
        for batch in sorted(batches):
            arms = [arm("none"), *(arm(m, best[m, batch]) for m in SWEEP), arm("rollspec")]
            for name in [n for n in live if n not in {a.name for a in arms}]:
                live.pop(name).close()
            for a in arms:
                if a.name not in live:
                    console.print(f"start {a.name}")
                    live[a.name] = Engine(a, policy.model, MAX_LEN)
                    live[a.name].run(Work(prompts[:8], [24] * 8, 8, 0))
            runs: dict[str, list[list[dict[str, Any]]]] = {a.name: [] for a in arms}
            for r in range(rounds):
                for a in arms if r % 2 == 0 else reversed(arms):
                    runs[a.name].append(epochs(live[a.name], batch))
                    total = sum(x["seconds"] for x in runs[a.name][-1])
                    console.print(f"batch {batch} round {r + 1}/{rounds} {a.name}: {total:.1f} s")
            results[str(batch)] = summarise(arms, runs)
            console.print(table(batch, results[str(batch)]))
    finally:
        for engine in live.values():
            engine.close()
    ordered = sorted(lengths)
    return save(
        "rollout" + ("-quick" if quick else ""),
        {
            "benchmark": "rollout",
            "provenance": began,
            "finished": {"load": provenance()["load"], "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())},
            "model": policy.model,
            "epochs": len(weights),
            "requests": len(prompts),
            "lengths": {f"p{q}": ordered[min(len(ordered) * q // 100, len(ordered) - 1)] for q in (50, 90, 99)}
            | {"max": ordered[-1]},
            "sweep_seconds": sweep,
            "batches": results,
        },
        out,
    )


def summarise(arms: list[Arm], runs: dict[str, list[list[dict[str, Any]]]]) -> dict[str, Any]:
    """Seconds, acceptance and paired ratios of one batch size. From the second epoch on, drafters have a history."""
    later = {name: [e["seconds"] for one in rounds for e in one[1:]] for name, rounds in runs.items()}
    first = {name: [one[0]["seconds"] for one in rounds] for name, rounds in runs.items()}
    suffix = next(a.name for a in arms if a.name.startswith("suffix"))
    # Best fixed arm of those measured, epoch by epoch: what an oracle that may switch arms would have got.
    oracle = [min(times) for times in zip(*later.values(), strict=True)]
    out: dict[str, Any] = {"arms": {}}
    for a in arms:
        every = [e for one in runs[a.name] for e in one[1:]]
        requests = sum(e["tokens"] for e in every)
        accepted, drafted = sum(e["accepted"] for e in every), sum(e["drafted"] for e in every)
        out["arms"][a.name] = {
            "seconds": later[a.name],
            "seconds_first_epoch": first[a.name],
            "speedup_later_epochs": asdict(ratio(later["none"], later[a.name])),
            "speedup_first_epoch": asdict(ratio(first["none"], first[a.name])),
            "acceptance_rate": accepted / drafted if drafted else None,
            "acceptance_length": requests / (requests - accepted) if requests > accepted else None,
            "propose_share": every[0]["propose_share"] and sum(e["propose_share"] for e in every) / len(every),
        }
    out["rollspec_over_suffix"] = asdict(ratio(later[suffix], later["rollspec"]))
    out["oracle_speedup"] = asdict(ratio(later["none"], oracle))
    return out


def table(batch: int, result: dict[str, Any]) -> Table:
    """One batch size for people."""
    t = Table(title=f"batch {batch}: generation, epochs from the second on")
    for column in ("arm", "seconds per epoch", "speed-up", "95 % interval", "first epoch", "acceptance length", "rate"):
        t.add_column(column, justify="left" if column == "arm" else "right")
    for name, a in result["arms"].items():
        s, f = a["speedup_later_epochs"], a["speedup_first_epoch"]
        t.add_row(
            name,
            f"{sum(a['seconds']) / len(a['seconds']):.2f}",
            f"{s['median']:.2f}x",
            f"{s['low']:.2f}-{s['high']:.2f}",
            f"{f['median']:.2f}x",
            f"{a['acceptance_length']:.2f}" if a["acceptance_length"] else "-",
            f"{a['acceptance_rate']:.2f}" if a["acceptance_rate"] is not None else "-",
        )
    o, r = result["oracle_speedup"], result["rollspec_over_suffix"]
    t.caption = (
        f"oracle over these arms {o['median']:.2f}x; rollspec / best suffix {r['median']:.2f} "
        f"({r['low']:.2f}-{r['high']:.2f})"
    )
    return t
