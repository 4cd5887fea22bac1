"""Synthetic runs for the report's tests: the shape of a real demo, invented numbers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

CLOCK = {"played": 1.1, "oracle": 1.04}
MODELLED = {"played": 1.0, "none": 1.6, "suffix:4": 1.05, "suffix:16": 1.2, "oracle": 0.98, "clairvoyant": 0.9,
            "perfect": 0.5}  # fmt: skip


def rows(speculating: bool, epochs: int = 3, per_epoch: int = 6, seed: int = 0) -> list[dict[str, Any]]:
    """One row per step; generation gets faster from the second epoch on when `speculating`."""
    rng = random.Random(seed + speculating)
    out = []
    for i in range(epochs * per_epoch):
        epoch = i // per_epoch
        lengths = [min(512, max(12, int(rng.lognormvariate(3.9, 0.7)))) for _ in range(64)]
        pace = 1.0 if not speculating else (1.15, 1.6, 1.75)[min(epoch, 2)]
        gen = sum(lengths) / (420 * pace) * rng.uniform(0.95, 1.05) + 0.4
        row: dict[str, Any] = {
            "training/global_step": i + 1,
            "training/epoch": epoch,
            "timing_s/gen": gen,
            "timing_s/step": gen + 5.2 + rng.uniform(0, 0.4),
            "timing_s/update_actor": 3.1 + rng.uniform(0, 0.2),
            "timing_s/old_log_prob": 1.1,
            "timing_s/update_weights": 0.4,
            "timing_s/adv": 0.01,
            "timing_per_token_ms/gen": gen * 1000 / sum(lengths),
            "critic/score/mean": 0.35 + 0.02 * i + rng.gauss(0, 0.03),
            "critic/rewards/mean": 0.35 + 0.02 * i + rng.gauss(0, 0.03),
            "response_length/mean": sum(lengths) / len(lengths),
            "response_length/max": max(lengths),
            "response_length/min": min(lengths),
            "response_length/clip_ratio": sum(n == 512 for n in lengths) / len(lengths),
            "training/rollout_actor_probs_pearson_corr": 0.9995 + rng.uniform(0, 0.0004),
            "training/rollout_probs_diff_mean": 0.004 + rng.uniform(0, 0.001),
            "rollspec/length/p50": sorted(lengths)[32],
            "rollspec/length/p90": sorted(lengths)[57],
            "rollspec/length/p99": sorted(lengths)[63],
            "rollspec/length/max": max(lengths),
            "rollspec/health/ess_token": 0.9991 + rng.uniform(0, 0.0004),
            "rollspec/health/ess_sequence": 0.93 + rng.uniform(0, 0.03),
            "rollspec/health/ratio_outside": 0.002,
            "rollspec/health/warnings": 0,
            "lengths": lengths,
        }
        if epoch:
            row |= {"rollspec/health/epoch_overlap": 0.05, "rollspec/health/epoch_overlap_chance": 0.048}
        if speculating:
            rate = (0.31, 0.47, 0.52)[min(epoch, 2)] + rng.uniform(-0.03, 0.03)
            drafted = 9000 + rng.randrange(500)
            row |= {
                "rollspec/accept/rate": rate,
                "rollspec/accept/length": 1 + 2.4 * rate,
                "rollspec/accept/drafted": drafted,
                "rollspec/accept/accepted": int(drafted * rate),
                "rollspec/accept/rate/group": rate + 0.05,
                "rollspec/accept/rate/global": rate - 0.12,
                "rollspec/accept/drafted/group": int(drafted * 0.8),
                "rollspec/accept/drafted/global": int(drafted * 0.2),
                "rollspec/rollout/propose_share": 0.03 + rng.uniform(0, 0.01),
                "rollspec/rollout/propose_seconds": gen * 0.03,
                "rollspec/rollout/engine_seconds": gen * 0.97,
                "rollspec/rollout/speculating": 1.0,
                "rollspec/faults": 1 if i == 7 else 0,
                **({"rollspec/faults/history.save": 1} if i == 7 else {}),
                **{f"rollspec/tuner/modelled_seconds/{k}": gen * v for k, v in MODELLED.items()},
                **{f"rollspec/tuner/clock_seconds/{k}": gen * v for k, v in CLOCK.items()},
                **{f"rollspec/tuner/arm/{k}": v for k, v in {"none": 0.2, "suffix:4": 0.5, "suffix:16": 0.3}.items()},
                "rollspec/tuner/cost_error": 0.04,
                "rollspec/tuner/share": 0.006,
                "rollspec/accept/max_acceptance": 0.81,
                **{f"rollspec/accept/position/{k}": rate * 0.97**k + 0.1 for k in range(1, 17)},
            }
        out.append(row)
    return out


def drafter_rows(data: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same run with a draft head that gets better with every version."""
    for i, row in enumerate(data):
        version = i // 4
        row |= {
            "rollspec/drafter/version": version,
            "rollspec/drafter/staleness": i % 4,
            "rollspec/drafter/loss": 4.0 / (1 + i),
            "rollspec/drafter/idle_seconds": 1.5,
            "rollspec/drafter/used_seconds": 1.0,
            "rollspec/drafter/wasted_seconds": 0.25,
            "rollspec/drafter/preempt_p99_seconds": 0.012,
            "rollspec/drafter/micro_step_seconds": 0.05,
            "rollspec/drafter/loss/accept_0": 2.0 / (1 + i),
            "rollspec/drafter/loss/rejected": 1.0 / (1 + i),
            "rollspec/drafter/accept_length": 1.0 + 0.2 * version,
        }
        if version and i % 4 == 0:
            row |= {f"rollspec/drafter/{k}": v for k, v in {"swaps": 1, "swap_seconds": 2e-3}.items()}
            row["rollspec/drafter/swap_longest"] = 2e-3
    return data


def write_run(folder: Path, data: list[dict[str, Any]], **provenance: Any) -> Path:
    """`data` and `provenance` as a run folder."""
    folder.mkdir(parents=True, exist_ok=True)
    flat = [{name: value for name, value in row.items() if name != "lengths"} for row in data]
    sizes = [{"step": row["training/global_step"], "lengths": row["lengths"]} for row in data if "lengths" in row]
    for name, lines in (("metrics", flat), ("lengths", sizes)):
        if lines:
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "run.json").write_text(json.dumps({"name": folder.name, "status": "finished", **provenance}))
    return folder


def write_demo(folder: Path) -> Path:
    """A demo folder with both runs."""
    shared: dict[str, Any] = {
        "settings": {"prompts_per_step": 8, "n": 8, "epochs": 3, "lr": 1e-5, "dtype": "bfloat16"},
        "machine": {"cpu": "2 cores of a test machine", "memory_gib": 23},
        "versions": {"rollspec": "0.1.0", "verl": "0.9.1", "vllm": "0.29.0", "torch": "2.13.0+cpu"},
        "git_sha": "0" * 40,
        "seed": 0,
        "command": ["python", "-m", "verl.trainer.main_ppo", *(f"key.number.{i}=value{i}" for i in range(12))],
    }
    write_run(folder / "baseline", rows(False), **shared)
    write_run(folder / "rollspec", rows(True), **shared)
    return folder
