"""Does speculation change how long responses get? One fixed policy, natural ends, without and with rollspec.

    rollspec bench lengths

Two trainings part whatever samples them, so their lengths compare policies. Here nothing is trained: the demo job's
last saved policy answers the job's prompts epoch after epoch, in turn by an engine without speculation and by one with
rollspec, whose history grows as in a job. Compared prompt by prompt: z of the mean difference in tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.drift import MAX_LEN, SAMPLES, Drift, drift, first_prompts
from benchmarks.engines import Arm, Engine, Work
from benchmarks.harness import QUICK, pin, provenance, save

PROMPTS, EPOCHS, BATCH = 32, 9, 32
DTYPES = ("bfloat16", "float32")


def difference(a: np.ndarray, b: np.ndarray) -> dict[str, Any]:
    """Mean of b - a in tokens with its standard error and z; lengths [prompts, samples], prompts paired."""
    gap = (b.mean(axis=1) - a.mean(axis=1)).mean()
    error = np.sqrt((a.var(axis=1, ddof=1) / a.shape[1] + b.var(axis=1, ddof=1) / b.shape[1]).sum()) / len(a)
    return {"tokens": float(gap), "error": float(error), "z": float(gap / error), "responses": int(a.size)}


def run(dtypes: Sequence[str] = DTYPES, quick: bool = False, out: Path | None = None, seed: int = 0) -> Path:
    """Print and save, for each number format, the differences of the first epoch, which has no history, and of the
    later ones.
    """
    pin()
    result: dict[str, Any] = {"benchmark": "lengths", **({"note": QUICK} if quick else {}), "provenance": provenance()}
    policy = drift()
    result |= {"policy": policy.made_by, "seed": seed, "dtypes": {}}
    for dtype in dtypes:
        found = measure(policy, dtype, *((4, 2) if quick else (PROMPTS, EPOCHS)), seed)
        result["dtypes"][dtype] = found
        for part in ("first_epoch", "later_epochs"):
            d = found[part]
            print(
                f"{dtype}, {part.replace('_', ' ')}: {d['tokens']:+.2f} +- {d['error']:.2f} tokens, "
                f"z = {d['z']:+.2f}, {d['responses']} responses each",
                file=sys.stderr,
            )
        path = save("lengths-quick" if quick else "lengths", result, out)
    return path


def measure(policy: Drift, dtype: str, prompts: int, epochs: int, seed: int = 0) -> dict[str, Any]:
    """Both arms in turn, epoch after epoch, in engines of their own."""
    chosen = [p for p in first_prompts(policy, prompts) for _ in range(SAMPLES)]
    lengths: dict[str, list[np.ndarray]] = {"none": [], "rollspec": []}
    drafts = {"drafted": 0, "accepted": 0}
    arms = (Arm("none", dtype=dtype, seed=seed), Arm("rollspec", rollspec="default", dtype=dtype, seed=seed))
    engines = {arm.name: Engine(arm, policy.model, MAX_LEN) for arm in arms}
    try:
        for epoch in range(epochs):
            for name, engine in engines.items():
                did = engine.run(Work(chosen, None, BATCH, epoch, policy.weights[-1], epoch == 0))
                lengths[name].append(np.reshape(did["lengths"], (-1, SAMPLES)).astype(float))
                if name == "rollspec":
                    drafts = {key: drafts[key] + int(did[key]) for key in drafts}
    finally:
        for engine in engines.values():
            engine.close()
    later = [np.concatenate(lengths[name][1:], axis=1) for name in ("none", "rollspec")]
    return {
        "mean": {name: float(np.mean(rounds)) for name, rounds in lengths.items()},
        "first_epoch": difference(lengths["none"][0], lengths["rollspec"][0]),
        "later_epochs": difference(*later),
        **drafts,
    }
