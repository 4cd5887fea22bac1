"""What the audit finds, and how rarely it cries wolf: planted biases of 1 % in a simulation and in a real engine.

    python -m benchmarks.audit_power false-alarms --audits 3000 --seed 0     # parts add up over calls
    python -m benchmarks.audit_power power
    python -m benchmarks.audit_power engine

The simulation is a Markov chain over 48 tokens with 2.0 nats per token (tests/unit/audit_cases.py). In the engine
part the whole command's work is timed: two engines, the reference model and the tests, on the demo's policy.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import RESULTS, from_tests, pin, provenance, save
from rollspec.audit.distribution import distribution_tests
from rollspec.audit.verdict import ALPHA

SIZES = {"uniform": (10_240, 20_480, 40_960), "argmax": (40_960, 163_840, 327_680)}
AUDITS = 20
SECONDS = 240.0  # that an audit may take
FAULTS = {"Uniform": None, "MostLikely": 160_000, "Second": None}
"""Planted faults, and the tokens sampled for each; None: as many as an audit samples by default."""
SOUND = "none"
"""In the place of a fault: rollspec's default preset, which must pass."""


def chain() -> Any:
    """The simulation that the tests use."""
    return from_tests("unit", "audit_cases")


def false_alarms(audits: int, seed: int) -> dict[str, Any]:
    """Audits of a correct sampler that fail at the default alpha, and at 5 % where the rate can be seen well."""
    sim = chain()
    rng = np.random.default_rng([77, seed])
    alarms = {ALPHA: 0, 0.05: 0}
    tokens = 0
    for run in range(audits):
        if run % 50 == 0:
            distribution = sim.make_distribution(rng, sharpness=rng.choice([1.5, 2.2, 4.0]))
        evidence, said = sim.sample(distribution, 1, rng)
        least = distribution_tests(evidence)[0].p_adjusted
        tokens += said.size
        for alpha in alarms:
            alarms[alpha] += least <= alpha
    return {"seed": seed, "audits": audits, "tokens": tokens, "alarms": {str(a): n for a, n in alarms.items()}}


def rates(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Alarms over all parts, with exact 95 % upper limits."""
    from scipy.stats import beta

    n = sum(p["audits"] for p in parts)
    out = {}
    for alpha in parts[0]["alarms"]:
        k = sum(p["alarms"][alpha] for p in parts)
        out[alpha] = {"alarms": k, "rate": k / n, "upper_95": float(beta.ppf(0.95, k + 1, n - k)) if k < n else 1.0}
    return {"audits": n, "by_alpha": out}


def power() -> list[dict[str, Any]]:
    """Shares of audits that find a bias of 1 %, by tokens."""
    sim = chain()
    biases = {"uniform": sim.mixed_with_uniform(0.01), "argmax": sim.mixed_with_argmax(0.01)}
    out = []
    for name, bias in biases.items():
        for tokens in SIZES[name]:
            rounds = tokens // (sim.PROMPTS * sim.SIBLINGS * sim.LENGTH)
            rng = np.random.default_rng([5, tokens])
            distribution = sim.make_distribution(rng)
            found = [
                distribution_tests(sim.sample(distribution, rounds, rng, bias)[0])[0].p_adjusted for _ in range(AUDITS)
            ]
            row = {
                "bias": f"1 % {name}",
                "tokens": tokens,
                "audits": AUDITS,
                "found": sum(p <= ALPHA for p in found) / AUDITS,
                "median_adjusted_p": float(np.median(found)),
            }
            print(row, flush=True)
            out.append(row)
    return out


def engine(
    faults: list[str],
    quick: bool = False,
    tokens: int | None = None,
    share: float = 0.01,
    given: Path | None = None,
) -> Iterator[dict[str, Any]]:
    """Whole audits of real engines with a planted fault, and of rollspec's as it is (`SOUND`), timed.

    Args:
        tokens: as many instead of `FAULTS`'.
        share: of them that the fault replaces.
        given: the model, instead of the demo's policy.
    """
    from benchmarks import planted
    from examples.grpo_arithmetic.prepare import prepare
    from rollspec.audit.engine import TOKENS, AuditPlan, Variant
    from rollspec.audit.prompts import token_prompts
    from rollspec.audit.run import run_audit

    with tempfile.TemporaryDirectory() as folder:
        model = str(given or prepare(folder, size="tiny" if quick else "demo").model)
        os.environ[planted.VARIABLE] = str(share)  # the engines' processes inherit it
        prompts = token_prompts(model, None, 8, 64)
        for fault in faults:
            plan = AuditPlan(prompts, tokens=2_000 if quick else tokens or FAULTS.get(fault) or TOKENS, samples=64)
            where = f" in {given.name}" if given else ""
            if fault == SOUND:
                arm = replace(Variant.with_rollspec("default", (), {}), name=f"no fault, rollspec's default{where}")
            else:
                name = f"{100 * share:g} % {fault}{where}"
                arm = Variant(name, engine={"logits_processors": [f"benchmarks.planted:{fault}"]})
            began = time.perf_counter()
            result = run_audit(model, plan, arm)
            seconds = time.perf_counter() - began
            row = {
                "bias": arm.name,
                "tokens": result.n_tokens,
                "seconds": seconds,
                "verdict": result.verdict,
                "log_probs_passed": not result.log_probs.failure if result.log_probs else None,
                "smallest_adjusted_p": min(t.p_adjusted for t in result.tests),
                "strongest": f"{result.tests[0].name}, {result.tests[0].where}",
                "mean_entropy": result.provenance["mean_entropy"],
                "stages": result.provenance["seconds"],
                "detectable": None
                if result.power is None
                else {"uniform": result.power.uniform, "argmax": result.power.argmax},
                "drafts": result.drafts and asdict(result.drafts),
                "found_in_time": result.verdict == ("pass" if fault == SOUND else "fail") and seconds <= SECONDS,
            }
            print(row, flush=True)
            yield row


def keep(out: Path, began: dict[str, Any], part: str, found: Any) -> Path:
    """Put a part beside what is in the file, which is read late: another part may have been written meanwhile."""
    whole: dict[str, Any] = json.loads(out.read_text()) if out.is_file() else {"benchmark": "audit_power"}
    if part == "false_alarms":
        parts = [p for p in whole.get(part, {}).get("parts", []) if p["seed"] != found["seed"]]
        found = {"parts": [*parts, found], **rates([*parts, found])}
        print(found)
    elif part == "engine":
        audits = whole.get(part, {}).get("audits", [])
        audits = [a for a in audits if (a["bias"], a["tokens"]) != (found["bias"], found["tokens"])]
        found = {"audits": [*audits, found]}
    whole |= {"provenance": began, part: found}
    return save("audit_power", whole, out)


def main() -> None:
    """Command line: each part goes into one file, beside what is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["false-alarms", "power", "engine"])
    parser.add_argument("--audits", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", default=",".join((SOUND, *FAULTS)), help="of the engine part; none: rollspec's own")
    parser.add_argument("--tokens", type=int, help="of the engine part, for every fault")
    parser.add_argument("--share", type=float, default=0.01, help="of the tokens that a fault replaces")
    parser.add_argument("--model", help="of the engine part: a folder, a name, or smollm2")
    parser.add_argument("--quick", action="store_true", help="show that the engine part runs")
    parser.add_argument("--out", type=Path, default=RESULTS / "audit_power.json")
    args = parser.parse_args()
    pin(os.cpu_count() if args.part == "engine" else None)  # an audit has the machine to itself
    began = provenance()
    if args.part == "false-alarms":
        path = keep(args.out, began, "false_alarms", false_alarms(args.audits, args.seed))
    elif args.part == "power":
        path = keep(args.out, began, "power", {"cells": power()})
    else:
        from examples.models import resolve

        model = resolve(args.model) if args.model else None
        for row in engine(args.faults.split(","), args.quick, args.tokens, args.share, model):
            path = keep(args.out, began, "engine", {**row, "provenance": began})
    print(path)


if __name__ == "__main__":
    main()
