"""The pages' tables of numbers are made from any result of the present code, and say what a file lacks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from report_samples import rows, write_run

from rollspec.telemetry.report import report_json
from rollspec.telemetry.runs import load_run
from scripts.generate import headline, numbers

BENCH = {
    "git": "c" * 40,
    "time": "2026-12-01T00:00:00Z",
    "cpu": "Intel(R) Xeon(R) CPU @ 2.70GHz",
    "cores": 2,
    "load": None,
}
RATIO = {"median": 0.8, "low": 0.64, "high": 1.0, "n": 5}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Results by name, in the place of those of the repository."""
    made = {
        "settings": {"n": 8, "train_prompts": 32, "dtype": "bfloat16"},
        "machine": {"cpu": "AMD EPYC", "cores": 2},
        "git_sha": "d" * 40,
        "started": "2026-11-30T00:00:00Z",
        "wall_seconds": 300.0,
    }
    runs = {name: write_run(tmp_path / name, rows(name == "rollspec"), **made) for name in ("baseline", "rollspec")}
    demo = report_json(load_run(runs["rollspec"]), load_run(runs["baseline"]))
    arm = {"speedup_over_none": RATIO, "speedup_over_suffix": None, "acceptance_length": 2.0, "acceptance_rate": 0.5,
           "pass_over_step": None}  # fmt: skip
    kinds = {kind: {"none": {**arm, "acceptance_rate": None}, "head": arm} for kind in numbers.PROMPTS}
    found: dict[str, Any] = {
        headline.DEMO: demo,
        "control": {"provenance": BENCH, "on_over_off": {"4": RATIO}},
        "head": {"provenance": BENCH, "model": "/models/small", "head": "/heads/h", "prompts": "built in",
                 "samples_per_prompt": 1, "batches": {"1": {**kinds, "runs": {}}}},
    }  # fmt: skip
    for module in (numbers, headline):
        monkeypatch.setattr(module, "load", lambda name, *_: found.get(name))
    return found


def test_the_headline_has_a_file_in_every_row_and_the_null_control(results: dict[str, Any]) -> None:
    text = numbers.headline()
    table = [line for line in text.splitlines() if line.startswith("|")][2:]
    assert len(table) == 5 and all(re.search(r"`[a-z0-9.-]+\.json` \|$", line) for line in table)
    assert "| 1.25x | 1.00-1.56 | `control.json` |" in text  # of times 0.8 (0.64-1.00)
    assert "|  | speed-up | 95 % interval; range under six pairs | file |" in text
    assert "generation, epoch 1 (no past responses yet" in text and "two measurements" not in text
    assert "over no drafts, SmolLM2-135M, new prompts, batch 1 | 0.80x |" in text and "drafts alone" not in text
    assert "bfloat16, 32 prompts of 8 samples, 18 steps over 3 epochs" in text and "10 minutes for both" in text
    assert "demo-0.32: AMD EPYC, 2 cores; control, head: Intel Xeon, 2 cores." in text
    results["control-smollm2"] = results["control"]
    arm = results["head"]["batches"]["1"]["fresh"]
    arm["head"]["speedup_over_suffix"] = RATIO  # one object in both kinds
    text = numbers.headline()
    assert "K = 0), SmolLM2-135M, batch 4" in text
    assert "over suffix drafts alone, SmolLM2-135M, new prompts, batch 1 | 0.80x |" in text


def test_other_tables(results: dict[str, Any]) -> None:
    assert (
        "ratios leave out the first step" in numbers.demo() and "| response length, with - without |" in numbers.demo()
    )
    assert "1.25x | 1.00-1.56 | 5 | Intel Xeon, 2 cores, 2026-12-01, cccccccc" in numbers.control()
    text = numbers.head()
    assert "| 1 | fresh | head | 0.80x (0.64-1.00) | not measured | 2.00 | 50 % | - |" in text
    assert "small, h, 1 sample of each prompt (built in), 5 pairs" in text and "**Null control:**" in text
    results.pop("control")
    assert numbers.control_line() == "" and "**Null control:**" not in numbers.head()


def test_the_tuner_and_the_peers_of_the_demos_policy(results: dict[str, Any]) -> None:
    arm = {"seconds": 12.34, "speedup": RATIO, "speedup_runs": RATIO, "acceptance_rate": 0.5, "drafted_per_token": 0.7,
           "modelled_regret": 0.01, "timed_regret": 0.052}  # fmt: skip
    results["tuner"] = {
        "provenance": BENCH, "runs": {"none": [[], []]},
        "arms": {"none": {**arm, "acceptance_rate": None}, "hedge": arm},
        "best_fixed": {"arm": "K=2", "fixed_over_hedge": RATIO, "goal": 1.05, "verdict": "missed"},
        "oracle": {"hedge_over_oracle": RATIO, "goal": 1.05, "verdict": "reached"},
    }  # fmt: skip
    text = numbers.tuner()
    assert "| none | 12.3 | 1 | 1 | 0.70 | - |" in text and "| hedge | 12.3 | 0.80x (0.64-1.00) |" in text
    assert "K=2 takes 0.80 (0.64-1.00) of the time of `hedge`, the default; goal 1.05, missed." in text
    assert "1.0 % by the cost model and 5.2 % by what its own steps took" in text and "two rounds" in text
    workload = {"arms": {"rollspec": {"speedup": RATIO}}}
    summary = {"workloads": {"epochs": workload, "full": workload}}
    results["peers-demo"] = {"provenance": BENCH, "summary": summary}
    assert "*epochs* 0.80x (0.64-1.00), *full* 0.80x (0.64-1.00) (`" in numbers.peers_demo()
    rows = [{"arm": "one head", "length": 2.0, "lengths": [1.9, 2.1]}]
    results["drafter-replicas"] = {"provenance": BENCH, "replicas": rows, "replicas_setting": {"steps": 240}}
    assert numbers.replicas().startswith("one head 2.00 (1.90 and 2.10) (240 micro-steps; `")


def test_side_by_side_has_a_row_for_the_default_and_one_with_a_head(results: dict[str, Any]) -> None:
    arms = {name: {"speedup": RATIO} for name in ("rollspec", "rollspec+head")}
    results["peers"] = {
        "provenance": BENCH,
        "summary": {"workloads": {"fresh": {"arms": arms}, "full": {"arms": arms}}},
    }
    rows = [line for line in numbers.headline().splitlines() if "`peers.json` |" in line]
    assert len(rows) == 2 and all("new prompts, batch 16 / a full batch of 64 | 0.80x / 0.80x |" in row for row in rows)


def test_repeats_are_a_row_for_each_quantity(results: dict[str, Any]) -> None:
    found = {"without": [1.5, -2.0], "with": [0.25], "shift": 0.25, "bound": 3.0}
    results["repeats"] = {"groups": [[[{}] * 4, []]], "length": found, "reward": {"without": [], "with": []}}
    text = numbers.repeats()
    assert "| tokens a response, bfloat16, runs of 4 steps | +1.5, -2.0 | +0.2 | +0.2 | ±3.0 | `" in text
    assert "| reward, bfloat16, runs of 4 steps | - | - | - | - | `" in text and "float32" not in text


def test_calibration_is_a_range_by_batch_and_by_who_drafted(results: dict[str, Any]) -> None:
    kinds = results["head"]["batches"]["1"]
    found = {"all": (0.9, 900), "eagle3": (1.1, 500), "x": (None, 900), "few": (9.0, 499)}
    kinds["fresh"]["head"] |= {"calibration": {name: {"ratio": r, "drafted": n} for name, (r, n) in found.items()}}
    said = numbers.calibration()
    assert said.startswith("0.90 to 0.90 at batch 1; by who drafted 1.10 to 1.10 of `eagle3`, each of 500 tokens or")


def test_the_cost_models_error_is_of_the_default_alone(results: dict[str, Any]) -> None:
    own, other = ([{"cost": {"error": e}} for e in errors] for errors in ((0.02, 0.04, 0.06), (0.5,)))
    results["peers"] = {"turns": [{"arms": {"rollspec": [*own, {}], "tetris": other}}]}
    assert numbers.cost_fit().startswith("4.0 %, and 6.0 % in the worst of 3 epochs and bursts")


def test_harm_says_which_batch_is_missing(results: dict[str, Any]) -> None:
    names = ("rollspec_over_none", "control_over_none", "rollspec_over_control")
    found = {name: RATIO for name in names} | {"goal": 1 / 0.99}
    results["harm-smollm2"] = {"provenance": BENCH, "batches": {"4": {"unpredictable": found}}}
    text = numbers.harm()
    assert "| 4 | 0.800 (0.640-1.000) | 0.800 (0.640-1.000) | 0.800 (0.640-1.000) | 5 |" in text
    assert "Goal at most 1.010. Batch 64 was not run on this model." in text
    results["harm-smollm2"]["batches"]["64"] = {"unpredictable": found}
    assert "Batch 64 was not run" not in numbers.harm()
