"""What the jobs of the reuse benchmark say: tokens saved, generation time, rewards against the job without reuse."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from examples.demo.job import JobSettings
from rollspec.telemetry.runs import GEN, Run
from rollspec.telemetry.summary import REWARD

GOAL = 1.5
"""Times as many tokens as independent suffix drafts save that replays under kept noise should save."""

Runs = Mapping[str, Mapping[int, dict[str, Any]]]
"""Arm -> seed -> what `read` found."""


def read(run: Run, settings: JobSettings) -> dict[str, Any]:
    """The series of a run, per training step: epoch, tokens of responses, tokens saved by drafts and by old prefixes,
    seconds of generation, reward, and what came back of the last epoch.
    """
    rollouts = settings.prompts_per_step * settings.n
    kept = run.series("rollspec/reuse/avg_saved_tokens")
    # Without rollspec steps are not counted: a batch that holds all rollouts takes a step per token of the longest one.
    whole = rollouts <= settings.max_num_seqs
    plain = [float(max(lengths)) if whole and lengths else None for lengths in run.lengths]
    counted = run.series("rollspec/rollout/steps")
    per_epoch = settings.steps_per_epoch
    return {
        "epoch": [(s - 1) // per_epoch for s in run.steps],
        "tokens": [sum(lengths) for lengths in run.lengths],
        "by_drafts": [v or 0.0 for v in run.series("rollspec/accept/accepted")],
        "by_prefixes": [round((v or 0.0) * rollouts, 3) for v in kept],
        "drafted": [v or 0.0 for v in run.series("rollspec/accept/drafted")],
        "engine_steps": [p if n is None else n for n, p in zip(counted, plain, strict=True)],
        "seconds": run.series(GEN),
        "reward": run.series(*REWARD),
        "returned": run.series("rollspec/reuse/share"),
        "overlap": run.series("rollspec/health/epoch_overlap"),
        "overlap_chance": run.series("rollspec/health/epoch_overlap_chance"),
        "lossy": any(v == 1.0 for v in run.series("rollspec/reuse/lossy")),
    }


def summarise(runs: Runs, distances: Runs | None = None) -> dict[str, Any]:
    """Per arm over its seeds; `distances`: what `reuse.distance` found of the lossy ones.

    Savings and times are of the epochs from the second on: before, there is no past.
    """
    out: dict[str, Any] = {"goal": GOAL, "arms": {}}
    for arm, seeds in runs.items():
        saved = {seed: _saved(found) for seed, found in seeds.items()}
        one: dict[str, Any] = {
            "seeds": sorted(seeds),
            "saved_share": statistics.mean(saved.values()),
            "saved_share_by_seed": saved,
            "by_drafts_share": statistics.mean(_share(f, "by_drafts") for f in seeds.values()),
            "by_prefixes_share": statistics.mean(_share(f, "by_prefixes") for f in seeds.values()),
            "engine_steps_later_epochs": _mean_known(_engine_steps(f) for f in seeds.values()),
            "drafted_per_token": statistics.mean(_share(f, "drafted") for f in seeds.values()),
            "seconds_later_epochs": statistics.mean(_later_sum(f, "seconds") for f in seeds.values()),
            "ms_per_token": statistics.mean(
                1e3 * _later_sum(f, "seconds") / _later_sum(f, "tokens") for f in seeds.values()
            ),
            "reward_last_epoch": {seed: _reward(f, max(f["epoch"])) for seed, f in seeds.items()},
            "overlap": _mean_later(seeds, "overlap"),
            "overlap_chance": _mean_later(seeds, "overlap_chance"),
            "lossy": any(f["lossy"] for f in seeds.values()),
        }
        if arm != "none" and "none" in runs:
            common = sorted(seeds.keys() & runs["none"].keys())
            one["generation_speedup"] = {
                s: _later_sum(runs["none"][s], "seconds") / _later_sum(seeds[s], "seconds") for s in common
            }
            one["engine_steps_saved"] = {
                s: 1.0 - mine / theirs
                for s in common
                if (mine := _engine_steps(seeds[s])) is not None and (theirs := _engine_steps(runs["none"][s]))
            }
            one["reward_difference"] = difference([(seeds[s], runs["none"][s]) for s in common])
        out["arms"][arm] = one
    out["total_variation"] = {
        arm: {
            "measured": statistics.mean(d["measured"] for d in seeds.values()),
            "error": sum(d["error"] ** 2 for d in seeds.values()) ** 0.5 / len(seeds),
            "theory": statistics.mean(d["theory"] for d in seeds.values()),
            "ruled_share": statistics.mean(d["ruled_share"] for d in seeds.values()),
            "seeds": sorted(seeds),
        }
        for arm, seeds in (distances or {}).items()
    }
    if "independent" in runs and "coupled" in runs:
        common = sorted(runs["independent"].keys() & runs["coupled"].keys())
        ratios = {s: _saved(runs["coupled"][s]) / _saved(runs["independent"][s]) for s in common}
        least = min(ratios.values(), default=None)
        out["coupled_over_independent"] = {
            "by_seed": ratios,
            "mean": statistics.mean(ratios.values()) if ratios else None,
            "goal_reached_in_every_seed": least is not None and least >= GOAL,
        }
        steps_of = {s: (_engine_steps(runs["independent"][s]), _engine_steps(runs["coupled"][s])) for s in common}
        out["independent_over_coupled_engine_steps"] = {s: a / b for s, (a, b) in steps_of.items() if a and b}
    return out


def difference(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any] | None:
    """Mean reward of an arm less that of no reuse, over the same training steps of all seeds, with a 95 % interval over
    (seed, epoch) means: steps of one job are not independent of each other. None with fewer than two pairs.
    """
    gaps = [
        _reward(mine, epoch) - _reward(theirs, epoch) for mine, theirs in pairs for epoch in sorted(set(mine["epoch"]))
    ]
    if len(gaps) < 2:
        return None
    from scipy.stats import t

    mean, error = statistics.mean(gaps), statistics.stdev(gaps) / len(gaps) ** 0.5
    half = float(t.ppf(0.975, len(gaps) - 1)) * error
    return {
        "mean": mean,
        "low": mean - half,
        "high": mean + half,
        "pairs": len(gaps),
        "within_noise": abs(mean) <= half,
    }


def _later(found: dict[str, Any], name: str) -> list[float]:
    return [v for v, e in zip(found[name], found["epoch"], strict=True) if e > 0 and v is not None]


def _later_sum(found: dict[str, Any], name: str) -> float:
    return float(sum(_later(found, name)))


def _share(found: dict[str, Any], name: str) -> float:
    return _later_sum(found, name) / _later_sum(found, "tokens")


def _saved(found: dict[str, Any]) -> float:
    """Tokens that took no step of their own, over all tokens of the responses."""
    return _share(found, "by_drafts") + _share(found, "by_prefixes")


def _engine_steps(found: dict[str, Any]) -> float | None:
    """Steps of the engine, each of which verifies what was drafted for all requests; None where they were not counted.

    A batch takes as many as its longest response needs: they say what the tail costs, and saved tokens what all cost.
    """
    known = _later(found, "engine_steps")
    return float(sum(known)) if len(known) == sum(e > 0 for e in found["epoch"]) else None


def _mean_known(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.mean(known) if known else None


def _mean_later(seeds: Mapping[int, dict[str, Any]], name: str) -> float | None:
    return _mean_known(v for f in seeds.values() for v in _later(f, name))


def _reward(found: dict[str, Any], epoch: int) -> float:
    return float(np.mean([r for r, e in zip(found["reward"], found["epoch"], strict=True) if e == epoch]))


def table(summary: dict[str, Any]) -> Table:
    """For people."""
    t = Table(title="reuse of past rollouts, epochs from the second on")
    for column in (
        *("arm", "seeds", "saved", "engine steps", "drafted / token", "ms / token", "generation"),
        *("TV", "reward", "overlap"),
    ):
        t.add_column(column, justify="left" if column == "arm" else "right")
    for arm, a in summary["arms"].items():
        speed = a.get("generation_speedup") or {}
        diff = a.get("reward_difference")
        engine_steps = a.get("engine_steps_later_epochs")
        fewer = a.get("engine_steps_saved") or {}
        tv = summary.get("total_variation", {}).get(arm)
        t.add_row(
            arm + (" (lossy)" if a["lossy"] else ""),
            str(len(a["seeds"])),
            f"{a['saved_share']:.0%}",
            ("-" if engine_steps is None else f"{engine_steps:.0f}")
            + (f" ({-statistics.mean(fewer.values()):+.0%})" if fewer else ""),
            f"{a['drafted_per_token']:.2f}",
            f"{a['ms_per_token']:.2f}",
            f"{statistics.mean(speed.values()):.2f}x" if speed else "-",
            f"{tv['measured']:.3f}" if tv else ("?" if a["lossy"] else "0"),
            f"{diff['mean']:+.3f} ({diff['low']:+.3f} to {diff['high']:+.3f})" if diff else "-",
            f"{a['overlap']:.0%}" if a["overlap"] is not None else "-",
        )
    if ratio := summary.get("coupled_over_independent"):
        t.caption = f"coupled saves {ratio['mean']:.2f} times what independent saves (goal {summary['goal']})"
    return t
