"""What a trainer's side measures of a step's rollouts, and how the answers of its engines become metrics.

Shared by the integrations: they differ in where rollouts and engines are found, not in what is made of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rollspec.telemetry.engine_stats import EngineStats
from rollspec.telemetry.health import HealthWatch
from rollspec.telemetry.metrics import to_metrics

Logprobs = Sequence[npt.NDArray[np.floating[Any]]]


def rollout_metrics(
    lengths: Sequence[int], scores: Sequence[float], engine: Logprobs = (), trainer: Logprobs = ()
) -> dict[str, float]:
    """Mean reward, length quantiles, and whether engine and trainer agree about the sampled tokens.

    Args:
        lengths: tokens per response.
        scores: reward per response; NaN where there was none.
        engine: log-probs of the sampled tokens per response, by the engine that sampled them.
        trainer: the same tokens' by the trainer's model; left out where its shape differs.
    """
    out: dict[str, float] = {}
    rewards = np.asarray(scores, float)
    if np.isfinite(rewards).any():
        out["rollspec/reward/mean"] = float(np.nanmean(rewards))
    if len(lengths):
        for q in (50, 90, 99):
            out[f"rollspec/length/p{q}"] = float(np.percentile(lengths, q))
        out["rollspec/length/max"] = float(max(lengths))
    if len(engine):
        sampled = np.concatenate(engine)
        out["rollspec/health/nan_logprobs"] = int(np.isnan(sampled).sum())
        if len(trainer):
            out |= HealthWatch.agreement(engine, trainer)
    return out


NO_ANSWER = "no answer"


def engine_metrics(answers: Sequence[Mapping[str, Any]], faults: Mapping[str, int]) -> dict[str, float]:
    """Metrics of all engines together.

    Args:
        answers: of each engine to the operation `stats`: an `EngineStats` mapping, `{}` where rollspec is off in it,
            `{"error": ...}` where it did not answer.
        faults: what failed on the trainer's side, by cause.
    """
    parts = [EngineStats.from_dict(a) for a in answers if a and "error" not in a]
    silent = sum("error" in a for a in answers)
    mine = EngineStats(speculating=False, faults={**faults, **({NO_ANSWER: silent} if silent else {})})
    measured = to_metrics(EngineStats.merge([*parts, mine]))
    if silent and not parts:  # nothing was measured, which is not the same as zero
        return {name: value for name, value in measured.items() if name.startswith("rollspec/faults")}
    return measured
