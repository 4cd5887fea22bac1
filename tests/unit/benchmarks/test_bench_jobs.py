"""Benchmarks that compare whole jobs: the tuner against fixed arms, harm, reuse, the long tail."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import cli as bench_cli
from benchmarks import drift, harm, jobs, long_tail, reuse, reuse_table, teachers, tuner
from benchmarks import tuner_table as tuned
from rollspec.config import RollspecConfig, resolve
from rollspec.errors import RollspecError

# ---- tuner and harm -------------------------------------------------------------------------------------------------


def test_the_moving_batch_halves_and_keeps_the_order() -> None:
    natural = [(7 * i) % 64 for i in range(64)]
    found = tuner.moving(natural, 48)
    assert min(found) == 48 and max(found) == 48 * 7
    running = [sum(n > t for n in found) for t in (0, 48, 96, 144, 48 * 7 - 1)]
    assert running == [64, 63, 31, 15, 1]
    assert sorted(range(64), key=found.__getitem__) == sorted(range(64), key=natural.__getitem__)


def test_every_arm_is_a_configuration() -> None:
    for name in tuner.ARMS[1:]:
        c = RollspecConfig.load(tuner.configuration(name, {1: 16, 8: 4, 64: 0}), env={})
        assert c.proposal.k_max == 16
    assert RollspecConfig.load(tuner.configuration("K=4"), env={}).tuning.arms == (4,)
    assert tuner.configuration("hedge") == {"preset": "default"}


def test_policies_are_chosen_by_name() -> None:
    assert tuner.chosen(None) == tuner.ARMS
    assert tuner.chosen(["oracle"]) == ("none", "hedge", "oracle")


def tuned_epochs(took: float) -> list[dict[str, Any]]:
    modelled = {
        "played": 2.0,
        "oracle": 1.9,
        "clairvoyant": 1.7,
        "perfect": 1.0,
        "fixed/none": 4.0,
        "fixed/suffix:4": 2.5,
        "clock/played": 2.1,
        "clock/oracle": 2.0,
    }
    return [
        {"seconds": took, "tokens": 100, "steps": 40, "drafted": 60, "accepted": 30, "after_end": 5,
         "propose_seconds": 0.1, "tuner_seconds": 0.01, "plays": {"none": 10, "suffix:4": 30}, "modelled": modelled,
         "buckets": {0: ([10.0, 40.0], [1.0, 1.0]), 6: ([640.0, 700.0], [1.0, 2.0])}, "alarms": 0, "faults": {}}
        for _ in range(3)
    ]  # fmt: skip


def test_the_tuner_is_held_against_the_best_fixed_arm_and_the_oracle() -> None:
    none = [{k: e[k] for k in ("seconds", "tokens", "steps", "after_end")} | {"drafted": 0, "accepted": 0}
            for e in tuned_epochs(4.0)]  # fmt: skip
    runs = {"none": [none] * 2, "K=2": [tuned_epochs(3.0)] * 2, "K=4": [tuned_epochs(2.4)] * 2,
            "hedge": [tuned_epochs(2.0)] * 2, "oracle": [tuned_epochs(1.95)] * 2}  # fmt: skip
    table = tuned.oracle_table(runs["hedge"][0])
    assert table == {1: 4, 64: 0}
    s = tuned.summarise(runs)
    assert s["best_fixed"]["arm"] == "K=4" and s["best_fixed"]["fixed_over_hedge"]["median"] == pytest.approx(1.2)
    assert s["best_fixed"]["verdict"] == s["oracle"]["verdict"] == "reached"
    assert s["arms"]["hedge"]["modelled_regret"] == pytest.approx(2.0 / 1.9 - 1)
    assert s["arms"]["hedge"]["timed_regret"] == pytest.approx(0.05)
    assert s["arms"]["none"]["modelled_regret"] is None
    shown = tuned.table({**s, "runs": runs, "requests": 64, "oracle_table": table})
    assert shown.row_count == 5
    assert "perfect drafter 4.00x" in str(shown.caption) and "64: 0" in str(shown.caption)
    assert "points from a measured one" not in str(shown.caption), "5.3 % by the model, 5.0 % and 2.6 % by the clock"
    runs["oracle"] = [tuned_epochs(1.8)] * 2
    parted = tuned.table({**tuned.summarise(runs), "runs": runs, "requests": 64, "oracle_table": table})
    assert "more than 3 points from a measured one" in str(parted.caption)
    assert tuned.oracle_table([{"faults": {"x": 1}}]) == {}


def test_harm_compares_whole_jobs() -> None:
    own = tuned_epochs(1.01)
    for e in own:
        e |= {"max_acceptance": 0.01, "drafters_off": ["suffix@64"]}
    jobs = {"none": tuned_epochs(1.0), "rollspec": own, "rollspec, K = 0": tuned_epochs(0.9)}
    runs = {name: [[{**e, "cpu_seconds": 2 * e["seconds"]} for e in job]] * 6 for name, job in jobs.items()}
    s = harm.summarise(runs)
    assert s["rollspec_over_none"]["median"] == s["rollspec_over_none_cpu"]["median"] == pytest.approx(1.01)
    assert s["control_over_none"]["median"] == pytest.approx(0.9)
    assert s["rollspec_over_control"]["median"] == pytest.approx(1.01 / 0.9)
    assert s["verdicts"]["rollspec_over_none"] == "reached" and s["verdicts"]["rollspec_over_control_cpu"] == "missed"
    assert s["drafted"] == 60 * 18 and s["plays"]["none"] == 180
    shown = harm.table({"4": {"useless": s}})
    assert shown.row_count == 1 and "rollspec_over_control missed: 4 useless" in str(shown.caption)


def test_unpredictable_prompts_never_repeat() -> None:
    job = harm.Job("unpredictable", [[1] * 8] * 4, "w", 272, 16, 0)
    one, two = job.work(0), job.work(1)
    assert len({tuple(p) for p in one.prompts + two.prompts}) == 8
    assert one.lengths == [16] * 4 and one.batch == 4
    assert harm.Job("useless", [[1] * 8] * 4, "w", 272, 16, 0).work(1).prompts == [[1] * 8] * 4


def test_flattening_touches_the_final_norm_alone(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file

    save_file({"lm_head.weight": torch.ones(2)}, str(tmp_path / "model-00001-of-00002.safetensors"))
    with pytest.raises(RollspecError, match=r"has no model\.norm\.weight"):
        harm.norms(str(tmp_path), tmp_path)
    save_file({harm.NORM: torch.full((4,), 3.0)}, str(tmp_path / "model-00002-of-00002.safetensors"))
    (tmp_path / "out").mkdir()
    flat, sharp = map(load_file, harm.norms(str(tmp_path), tmp_path / "out"))
    assert list(flat) == list(sharp) == [harm.NORM]
    assert torch.allclose(flat[harm.NORM], sharp[harm.NORM] * harm.FLATTEN) and sharp[harm.NORM][0] == 3


# ---- reuse ----------------------------------------------------------------------------------------------------------


def job(
    saved: float, prefixes: float = 0.0, seconds: float = 10.0, reward: float = 0.4, counted: bool = True
) -> dict[str, Any]:
    """Two epochs of two steps, 100 tokens each."""
    return {
        "epoch": [0, 0, 1, 1],
        "tokens": [100] * 4,
        "by_drafts": [0.0, 0.0, saved, saved],
        "by_prefixes": [0.0, 0.0, prefixes, prefixes],
        "drafted": [0.0, 0.0, 2 * saved, 2 * saved],
        "engine_steps": [90.0, 90.0, 50.0 - saved / 2, 50.0 - saved / 2] if counted else [None] * 4,
        "seconds": [20.0, 20.0, seconds, seconds],
        "reward": [reward, reward, reward + 0.1, reward + 0.1],
        "returned": [None] * 4,
        "overlap": [None, None, 0.5, 0.5],
        "overlap_chance": [None, None, 0.1, 0.1],
        "lossy": prefixes > 0,
    }


def test_what_reuse_saves_is_counted_from_the_second_epoch_on() -> None:
    runs = {
        "none": {0: job(0, reward=0.40), 1: job(0, reward=0.42, counted=False)},
        "independent": {0: job(20, seconds=8.0, reward=0.41), 1: job(30, seconds=8.0, reward=0.41)},
        "coupled": {0: job(40, seconds=5.0, reward=0.39)},
        "lenient, bias 0.5": {0: job(0, 60, seconds=4.0, counted=False)},
    }
    far = {"lenient, bias 0.5": {0: {"measured": 0.02, "error": 0.001, "theory": 0.021, "ruled_share": 0.6}}}
    s = reuse_table.summarise(runs, far)
    arms = s["arms"]
    assert arms["independent"]["saved_share_by_seed"] == {0: pytest.approx(0.2), 1: pytest.approx(0.3)}
    assert arms["lenient, bias 0.5"]["by_prefixes_share"] == pytest.approx(0.6) and arms["lenient, bias 0.5"]["lossy"]
    assert arms["coupled"]["generation_speedup"] == {0: pytest.approx(2.0)}
    assert arms["coupled"]["ms_per_token"] == pytest.approx(50.0)
    assert s["coupled_over_independent"]["by_seed"] == {0: pytest.approx(2.0)}
    assert s["coupled_over_independent"]["goal_reached_in_every_seed"]
    diff = arms["independent"]["reward_difference"]
    assert diff["mean"] == pytest.approx(0.0) and diff["within_noise"] and diff["pairs"] == 4
    assert arms["none"]["reward_last_epoch"] == {0: pytest.approx(0.5), 1: pytest.approx(0.52)}
    # Steps of the engine: 2 x 50 without reuse, in the one seed that counted them; 2 x 40 and 2 x 35; 2 x 30.
    assert arms["none"]["engine_steps_later_epochs"] == pytest.approx(100.0)
    assert arms["independent"]["engine_steps_later_epochs"] == pytest.approx(75.0)
    assert arms["independent"]["engine_steps_saved"] == {0: pytest.approx(0.2)}
    assert arms["coupled"]["engine_steps_saved"] == {0: pytest.approx(0.4)}
    assert arms["lenient, bias 0.5"]["engine_steps_later_epochs"] is None
    assert s["independent_over_coupled_engine_steps"] == {0: pytest.approx(80 / 60)}
    shown = reuse_table.table(s)
    assert shown.row_count == 4 and "2.00 times" in str(shown.caption)
    at = next(i for i, c in enumerate(shown.columns) if c.header == "engine steps")
    assert list(shown.columns[at].cells) == ["100", "75 (-20%)", "60 (-40%)", "-"]


def test_a_job_without_rollspec_takes_a_step_per_token_of_the_longest_response() -> None:
    lengths = [[3, 9, 4], [5, 7, 7]]
    counts = {"rollspec/rollout/steps": [None, 4.0]}

    run: Any = SimpleNamespace(steps=[1, 2], lengths=lengths, series=lambda *names: counts.get(names[0], [None, None]))
    settings = dataclasses.replace(reuse.SETTINGS, train_prompts=1, prompts_per_step=1, n=3, max_num_seqs=3)
    assert reuse_table.read(run, settings)["engine_steps"] == [9.0, 4.0]
    tight = dataclasses.replace(settings, max_num_seqs=2)
    assert reuse_table.read(run, tight)["engine_steps"] == [None, 4.0]


def reuse_jobs(seeds: Sequence[int], arms: Sequence[str], work: Path) -> list[tuple[str, int, Any]]:
    return jobs.of_seeds(seeds, arms, work, reuse.SETTINGS, reuse._job)


def test_jobs_of_the_reuse_benchmark_differ_in_rollspec_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verl")
    manifest = tmp_path / "m.json"
    manifest.write_text("{}")
    assets = drift.Assets("model", "train", "val", "reward", str(manifest))
    monkeypatch.setattr(jobs, "prepare_assets", lambda *_: assets)
    found = {arm: j for arm, _, j in reuse_jobs((3,), tuple(reuse.ARMS), tmp_path)}
    commands = {
        arm: [c for c in j.command if "experiment_name" not in c and "local_dir" not in c] for arm, j in found.items()
    }
    differ = {
        tuple(i for i, (a, b) in enumerate(zip(commands["none"], c, strict=True)) if a != b) for c in commands.values()
    }
    assert len(differ - {()}) == 1 and len(next(iter(differ - {()}))) == 1
    (at,) = next(iter(differ - {()}))
    assert "reuse:{mode:'replay'" in commands["coupled"][at] and "seed:3" in commands["coupled"][at]
    assert "mode:'lenient'" in commands["lenient, bias 0"][at] and "bias:0.0" in commands["lenient, bias 0"][at]
    assert "mode:'lenient'" not in commands["independent"][at] and len({j.folder for j in found.values()}) == 5


def test_the_reuse_benchmark_pools_finished_jobs_of_its_own_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = tmp_path / "m.json"
    manifest.write_text("{}")
    assets = drift.Assets("model", "train", "val", "reward", str(manifest))
    monkeypatch.setattr(jobs, "prepare_assets", lambda *_: assets)
    for seed in (0, 1):
        for arm, _, made in reuse_jobs((seed,), ("none", "coupled"), tmp_path):
            made.folder.mkdir(parents=True, exist_ok=True)
            same = made.settings_hash if (arm, seed) != ("coupled", 1) else "another"
            status = "finished" if (arm, seed) != ("none", 1) else "failed"
            (made.folder / "run.json").write_text(json.dumps({"settings_hash": same, "status": status}))
            (made.folder / "metrics.jsonl").write_text("")
    found = jobs.finished(reuse_jobs(jobs.seeds_in(tmp_path), tuple(reuse.ARMS), tmp_path), Console())
    assert [(arm, seed) for arm, seed, _ in found] == [("none", 0), ("coupled", 0)]
    said = capsys.readouterr().out
    assert "seed 1, none: unfinished or of other settings" in said and "seed 1, coupled: unfinished" in said


@pytest.mark.parametrize(("args", "says"), [(["--seeds", "x"], "--seeds 'x'"), (["--arms", "nothing"], "'nothing'")])
def test_reuse_refuses_what_it_does_not_know(args: list[str], says: str) -> None:
    result = CliRunner().invoke(bench_cli.command, ["reuse", *args])
    assert isinstance(result.exception, RollspecError) and says in str(result.exception)


WAITS = ("preempt_seconds", "preempt_p99_seconds", "micro_step_seconds", "head_length")


def _long_job(gen: float, step: float, trained: bool = False, lengths: int = 5) -> dict[str, Any]:
    steps, epochs = 16, [e for e in range(4) for _ in range(4)]
    found: dict[str, Any] = {"epoch": epochs, "lengths": [[lengths]] * steps}
    found |= {name: [0.0] * steps for name in (*long_tail.COUNTS, "faults", *WAITS)}
    found |= {"gen": [gen] * steps, "step": [step] * steps}
    if trained:
        found |= {"idle_seconds": [2.0] * steps, "used_seconds": [1.5] * steps, "train_steps": [3.0] * steps}
    return found


def test_long_tail_compares_steps_of_the_same_work() -> None:
    runs = {
        "suffix": {0: _long_job(12.0, 30.0)},
        "long_tail": {0: _long_job(10.0, 28.0, trained=True)},
        "trained, never swapped": {0: _long_job(11.0, 30.3, trained=True)},
        "not trained": {0: _long_job(11.0, 30.0, lengths=6)},
    }
    summary = long_tail.summarise(runs)
    gain, cost_ = summary["head_and_suffix_over_suffix"], summary["training_while_idle"]
    assert gain["second half"]["pairs"].median == pytest.approx(1.2) and gain["second half"]["verdict"] == "reached"
    assert gain["first epoch"]["pairs"].n == 4 and gain["second half"]["pairs"].n == 8 and gain["same_lengths"] == 1.0
    assert cost_["all"]["sums"] == pytest.approx(1.01) and cost_["same_lengths"] == 0.0
    assert summary["arms"]["long_tail"]["used"] == pytest.approx(0.75)
    assert summary["arms"]["suffix"]["used"] is None
    assert "48 training steps" in str(long_tail.table(summary).caption)
    assert long_tail.summarise({"suffix": runs["suffix"]})["head_and_suffix_over_suffix"] is None


def test_long_tail_refuses_an_arm_it_does_not_know() -> None:
    done = CliRunner().invoke(bench_cli.command, ["long-tail", "--arms", "none"])
    assert isinstance(done.exception, RollspecError) and "--arms has 'none'" in str(done.exception)


def test_of_a_batch_that_stays_the_distance_is_that_to_the_best_arm() -> None:
    def run(*seconds: float) -> list[dict[str, Any]]:
        return [{"seconds": s} for s in seconds]

    runs = {"none": [run(4, 4)] * 3, "K=2": [run(2, 2)] * 3, "hedge": [run(3, 2.02)] * 3}
    found = tuned.distance(runs)
    assert found["best"] == "K=2" and found["hedge_over_best_later"]["median"] == pytest.approx(1.01)
    assert found["verdict"] == "undecided" and found["verdict_later"] == "undecided", "three pairs"
    assert tuned.distance({k: v * 2 for k, v in runs.items()})["verdict_later"] == "reached"
    assert tuned.distances({"batches": {"4": found}}).row_count == 1


def test_teachers_differ_in_where_samples_come_from() -> None:
    steps = [
        {"acceptance": 1.0, "captured": 4.0, "trained": 10.0, "step_seconds": 9.0},
        {"acceptance": 1.2, "captured": 4.0, "trained": 20.0, "step_seconds": 3.0},
        {"acceptance": 1.4, "from_policy": 8.0, "trained": 30.0, "step_seconds": 5.0, "policy_share": 0.02},
    ]
    found = teachers.summary(steps)
    assert found["acceptance_last_quarter"] == 1.4 and found["trained_tokens"] == 60.0 and found["samples"] == 16.0
    assert found["step_seconds"] == 4.0, "without the first step"
    assert found["policy_share"] == 0.02 and teachers.summary([{}])["samples"] == 0.0
    assert found["trained_tokens_until_1.25"] == 30.0 and found["trained_tokens_until_1.5"] is None
    made = resolve("long_tail", env={}, overrides=[*teachers.DRAFTING, "drafter.mode=policy"])
    assert made.drafter.trains and made.tuning.lengths(made.proposal.k_max)[-1] == 3


def test_what_reading_the_training_pass_costs_is_paired_by_steps_and_tokens() -> None:
    def rows(seconds: float, tokens: float) -> dict[str, Any]:
        row = {"log_prob_seconds": seconds, "job_tokens": tokens, "step_seconds": 10.0}
        return {"steps": [row | {"log_prob_seconds": 99.0}, *[row] * 7]}

    found = teachers.costs_of({"0": rows(2.2, 200.0), "1": rows(9.0, 1.0)}, {"0": rows(1.0, 100.0)})
    assert found["pairs"] == 7 and found["median"] == pytest.approx(0.02) and found["verdict"] == "reached"
    assert teachers.costs_of({"0": rows(2.2, 200.0)}, {}) == {}
