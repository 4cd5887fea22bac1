"""Does speculation change how long responses get? One fixed policy, natural ends, without and with rollspec.

    python -m benchmarks.lengths

Two trainings part whatever samples them, so their lengths compare policies. Here nothing is trained: the demo job's
last saved policy answers the job's prompts epoch after epoch, in turn by an engine without speculation and by one with
rollspec, whose history grows as in a job. Compared prompt by prompt: z of the mean difference in tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.drift import drift
from benchmarks.engines import Engine, Work
from benchmarks.harness import pin, provenance, save
from benchmarks.rollout import MAX_LEN, SAMPLES, arm, first_prompts

PROMPTS, EPOCHS, BATCH = 32, 9, 32


def difference(a: np.ndarray, b: np.ndarray) -> dict[str, Any]:
    """Mean of b - a in tokens with its standard error and z; lengths [prompts, samples], prompts paired."""
    gap = (b.mean(axis=1) - a.mean(axis=1)).mean()
    error = np.sqrt((a.var(axis=1, ddof=1) / a.shape[1] + b.var(axis=1, ddof=1) / b.shape[1]).sum()) / len(a)
    return {"tokens": float(gap), "error": float(error), "z": float(gap / error), "responses": int(a.size)}


def run(out: Path | None = None) -> Path:
    """Print and save the differences of the first epoch, which has no history, and of the later ones."""
    pin()
    began, policy = provenance(), drift()
    prompts = [p for p in first_prompts(policy, PROMPTS) for _ in range(SAMPLES)]
    lengths: dict[str, list[np.ndarray]] = {"none": [], "rollspec": []}
    drafts = {"drafted": 0, "accepted": 0}
    engines = {name: Engine(arm(name), policy.model, MAX_LEN) for name in lengths}
    try:
        for epoch in range(EPOCHS):
            for name, engine in engines.items():
                did = engine.run(Work(prompts, None, BATCH, epoch, policy.weights[-1], epoch == 0))
                lengths[name].append(np.reshape(did["lengths"], (-1, SAMPLES)).astype(float))
                if name == "rollspec":
                    drafts = {key: drafts[key] + int(did[key]) for key in drafts}
    finally:
        for engine in engines.values():
            engine.close()
    later = [np.concatenate(lengths[name][1:], axis=1) for name in ("none", "rollspec")]
    result = {
        "benchmark": "lengths",
        "provenance": began,
        "policy": policy.made_by,
        "mean": {name: float(np.mean(rounds)) for name, rounds in lengths.items()},
        "first_epoch": difference(lengths["none"][0], lengths["rollspec"][0]),
        "later_epochs": difference(*later),
        **drafts,
    }
    for part in ("first_epoch", "later_epochs"):
        d = result[part]
        print(
            f"{part}: {d['tokens']:+.2f} +- {d['error']:.2f} tokens, z = {d['z']:+.2f}, {d['responses']} responses each"
        )
    return save("lengths", result, out)


if __name__ == "__main__":
    run()
