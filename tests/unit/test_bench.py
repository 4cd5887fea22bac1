from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from drafter_target import filled, target
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import (
    audit_power,
    bandits,
    cost,
    cost_table,
    drift,
    harm,
    harness,
    head,
    jobs,
    long_tail,
    propose,
    recipes,
    reuse,
    reuse_table,
    rollout,
    rollout_table,
    tuner,
)
from benchmarks import cli as bench_cli
from benchmarks import tuner_table as tuned
from rollspec.config import RollspecConfig
from rollspec.errors import HistoryError, RollspecError
from rollspec.tuning import store
from rollspec.tuning.cost import CostModel
from rollspec.tuning.tuner import Tuner


def test_ratio_is_paired_and_carries_its_spread() -> None:
    # The machine slows down by 10x half way: pairs do not mind.
    a = [2.0, 2.2, 1.8, 20.0, 22.0]
    b = [1.0, 1.1, 0.9, 10.0, 11.0]
    r = harness.ratio(a, b)
    assert r.median == pytest.approx(2.0)
    assert r.low <= r.median <= r.high and r.n == 5


def test_ratio_refuses_what_is_not_a_pair() -> None:
    with pytest.raises(ValueError, match="pairs"):
        harness.ratio([1.0], [])


def test_provenance_says_where_and_with_what() -> None:
    p = harness.provenance()
    assert {"git", "dirty", "versions", "cpu", "cores", "OMP_NUM_THREADS", "load", "time"} <= p.keys()


def test_propose_writes_json(tmp_path: Path) -> None:
    path = propose.run(quick=True, out=tmp_path / "p.json")
    found = json.loads(path.read_text())
    assert set(found["batches"]) == {"1", "8", "32", "64"}
    assert found["provenance"]["cores"]


def epochs(seconds: float, accepted: int) -> list[dict[str, Any]]:
    return [
        {"seconds": seconds * (2 if e == 0 else 1), "tokens": 100, "accepted": accepted, "drafted": 2 * accepted,
         "steps": 50, "after_end": 5, "propose_share": 0.02}
        for e in range(3)
    ]  # fmt: skip


RUNS = {
    "none": [epochs(4.0, 0)],
    "ngram K=4": [epochs(3.0, 40)],
    "rollspec": [epochs(2.0, 60)],
}


def test_summary_compares_later_epochs_with_the_best_ngram() -> None:
    s = rollout_table.summarise(RUNS)
    rollspec = s["arms"]["rollspec"]
    assert rollspec["speedup_later_epochs"]["median"] == pytest.approx(2.0)
    assert rollspec["speedup_all_epochs"]["median"] == pytest.approx(2.0)
    assert rollspec["acceptance_length"] == pytest.approx(2.5)
    assert rollspec["ms_per_step"] == pytest.approx(40.0)
    assert s["rollspec_over_ngram"]["median"] == pytest.approx(1.5)


def test_what_a_head_adds_is_told_by_workload_over_none_and_over_memory() -> None:
    def round_of(seconds: float, accepted: int, source: str | None) -> list[dict[str, Any]]:
        counts = {source: [2 * accepted, accepted]} if source else {}
        one = {"tokens": 100, "drafted": 2 * accepted, "accepted": accepted, "by_source": counts}
        return [{**one, "seconds": seconds}, {**one, "seconds": seconds / 2}]

    runs = {
        "none": [round_of(4.0, 0, None)] * 2,
        "memory": [round_of(4.0, 5, "suffix")] * 2,
        "head": [round_of(2.0, 50, "eagle3")] * 2,
    }
    s = head.summarise(runs)
    assert (
        s["fresh"]["head"]["speedup_over_none"]["median"] == s["repeated"]["head"]["speedup_over_memory"]["median"] == 2
    )
    assert s["fresh"]["head"]["acceptance_length"] == 2.0 and s["fresh"]["none"]["acceptance_rate"] is None
    assert s["fresh"]["head"]["by_source"] == {"eagle3": [200, 100]}
    assert head.table(4, s).row_count == 6


def test_recipes_train_from_one_folder_and_are_measured_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, model = tmp_path / "head", target(tmp_path)
    filled(model, 12).save(folder / "buffer")
    record = {"target": str(model), "aux_layers": [1, 2, 3], "temperature": 1.0}
    (folder / "make-head.json").write_text(json.dumps(record))
    monkeypatch.setattr(recipes, "STEPS", 2)
    out = recipes.run(folder, ["default", "random start"], (0,), 0.2, 40, tmp_path / "out.json")
    found = json.loads(out.read_text())["arms"]
    assert list(found) == ["default", "random start"]
    for runs in found.values():
        curve = runs["0"]["curve"]
        assert 0 < len(curve) <= recipes.LOOKS and curve[-1]["cpu_seconds"] >= 0.2
        assert 1.0 <= curve[-1]["acceptance_length"] <= 3.0 and runs["0"]["ceiling"] == found["default"]["0"]["ceiling"]


def test_the_oracle_is_the_best_of_the_others() -> None:
    s = rollout_table.summarise(RUNS)
    assert s["oracle"]["arm"] == "ngram K=4"
    assert s["rollspec_over_oracle"]["median"] == pytest.approx(1.5)
    slow = {**RUNS, "ngram K=4": [epochs(4.5, 40)]}
    assert rollout_table.summarise(slow)["oracle"]["arm"] == "none"


def test_the_table_shows_the_limit_and_the_share_of_drafting() -> None:
    s = rollout_table.summarise(RUNS)
    bare = rollout_table.table(8, s)
    assert bare.row_count == 3
    full = rollout_table.table(
        8, s | {"perfect_drafter": {"k": 8, "seconds": 1.0}, "full_batch": {"propose_share": 0.021}}
    )
    assert full.row_count == 4
    assert "2.1 % of a step" in str(full.caption)


def test_arms_by_name() -> None:
    arms = (rollout.arm("none"), rollout.arm("ngram", 4), rollout.arm("perfect", 8))
    assert [a.name for a in arms] == ["none", "ngram K=4", "perfect K=8"]
    assert rollout.arm("perfect", 8).accept_all
    assert rollout.arm("rollspec").speculative is None and rollout.arm("rollspec").rollspec == "default"


def test_prompts_come_in_whole_groups_at_batch_1() -> None:
    class Counts:
        def __init__(self) -> None:
            self.works: list[Any] = []

        def run(self, work: Any) -> dict[str, Any]:
            self.works.append(work)
            return {"lengths": [3] * len(work.prompts)}

    prompts = [[p, p] for p in range(8)]
    engine = Counts()
    load = rollout.Load(drift.Drift("", "", [], ""), prompts, ["v0", "v1"])
    load.record(engine)  # type: ignore[arg-type]
    load.epochs(engine, 1)  # type: ignore[arg-type]
    load.epochs(engine, 8)  # type: ignore[arg-type]
    first, second, eighth = engine.works[2], engine.works[3], engine.works[4]
    assert sorted(p[0] for p in first.prompts) == [0] * 8 + [1] * 8
    assert len(eighth.prompts) == 64 and len(eighth.lengths) == 64
    assert first.reset and not second.reset and second.weights == "v1"


def test_help_lists_every_benchmark() -> None:
    out = CliRunner().invoke(bench_cli.command, ["--help"]).output
    assert all(name in out for name in (*bench_cli.NAMES, "all"))


@pytest.mark.parametrize("bad", ["x", "0", "1,99"])
def test_batches_that_cannot_be_run(bad: str) -> None:
    result = CliRunner().invoke(bench_cli.command, ["rollout", "--batches", bad])
    assert isinstance(result.exception, RollspecError) and bad in str(result.exception)


def test_a_verdict_needs_the_whole_interval_and_six_pairs() -> None:
    def found(*pairs: float) -> harness.Ratio:
        return harness.ratio(pairs, [1.0] * len(pairs))

    assert harness.verdict(found(*[1.01] * 6), 1.02) == "reached"
    assert harness.verdict(found(*[1.05] * 6), 1.02) == "missed"
    assert harness.verdict(found(*[1.00, 1.05] * 4), 1.02) == "undecided"
    assert harness.verdict(found(*[1.01] * 5), 1.02) == "undecided"
    assert harness.verdict(found(*[1.10] * 6), 1.05, most=False) == "reached"
    assert harness.verdict(found(*[1.01] * 6), 1.05, most=False) == "missed"


# ---- cost -----------------------------------------------------------------------------------------------------------


def seconds(tokens: float, context_tokens: float) -> float:
    """Flat to 32 tokens, then 0.5 ms each; 2 us per context token."""
    return 0.010 + 0.0005 * max(0.0, tokens - 32) + 2e-6 * context_tokens


def swept() -> tuple[list[list[Any]], list[list[cost_table.Cell]]]:
    """Two rounds of the whole grid, with no noise."""
    steps: list[list[Any]] = [[], []]
    cells: list[list[cost_table.Cell]] = [[], []]
    for prompt in (16, 800):
        for spot in cost.grid(cost.REQUESTS, cost.DRAFTS, prompt):
            tokens, context_tokens = spot.requests * (1 + spot.k), float(spot.requests * prompt)
            for r in range(2):
                took = seconds(tokens, context_tokens)
                steps[r] += [(tokens, took, context_tokens, 0, spot.requests)] * 10
                accepted = None if spot.right is None else float(spot.right)
                cells[r].append(
                    cost_table.Cell(spot.requests, spot.k, spot.right, prompt, context_tokens, took, accepted)
                )
    return steps, cells


def test_the_sweep_covers_accepted_and_rejected_with_whole_drafts() -> None:
    spots = list(cost.grid(cost.REQUESTS, cost.DRAFTS))
    assert len(spots) == len(set(spots)) == len(cost.REQUESTS) * (1 + 2 * (len(cost.DRAFTS) - 1))
    assert {s.right for s in spots if not s.k} == {None}
    assert cost.Spot(8, 4, True).length == 1 + 5 * cost.STEPS
    assert cost.Spot(8, 16, False).length == 1 + cost.STEPS + 16
    assert max(s.length for s in spots) + cost.PROMPT <= cost.LEAST_LEN


def test_the_fit_finds_the_knee_and_the_picture_is_drawn(tmp_path: Path) -> None:
    steps, cells = swept()
    model = cost.fit(steps)
    s = cost_table.summarise(model, cells, cost.fit(steps[:-1]))
    assert s["error"]["median"] < 0.05 and s["error_held_out"]["cells"] == len(cells[0])
    assert s["knee"]["flat"] and s["knee"]["knee"] == pytest.approx(32, rel=0.05)
    assert s["knee"]["us_per_token"] == pytest.approx(500, rel=0.05)
    assert s["doubles"] == pytest.approx(52, abs=8)
    assert s["accepted_over_rejected"] == pytest.approx(1.0)
    assert s["ms_per_1000_context_tokens"] == pytest.approx(2.0, rel=0.25)
    assert [o["to"] for o in s["octaves"]][-1] == 64 * 17
    t = cost_table.table(s)
    assert t.row_count == len(cost.REQUESTS) and "knee" in str(t.caption)
    drawn = cost_table.picture(model, s, tmp_path / "cost.png")
    assert drawn is not None and drawn.stat().st_size > 10_000


def test_without_a_flat_part_there_is_no_knee() -> None:
    cells = [cost_table.Cell(b, k, None, 16, 0.0, 0.001 * b * (1 + k), None) for b in (1, 8, 64) for k in (0, 4, 16)]
    found = cost_table.knee(cells, 0.0)
    assert not found["flat"] and found["error"] < 0.05


def test_a_job_starts_from_the_stored_fit(tmp_path: Path) -> None:
    steps, _ = swept()
    model, machine = cost.fit(steps), {"device": "here"}
    cost.keep(tmp_path, model, machine)
    learned, problem = store.load(tmp_path, machine)
    assert problem is None and learned is not None
    c = RollspecConfig.load("default")
    again = Tuner(c.tuning, c.proposal.k_max, c.proposal.drafters)
    again.restore(learned["tuner"])
    assert again.cost.fitted and again.cost.seconds(64) == pytest.approx(model.seconds(64), rel=0.05)
    # What the job learned meanwhile is kept when the sweep is made again.
    learned["tuner"]["seen"] = 40
    store.save(tmp_path, learned, machine)
    cost.keep(tmp_path, model, machine)
    assert (store.load(tmp_path, machine)[0] or {})["tuner"]["seen"] == 40


def test_a_checkpoint_that_cannot_be_swept(tmp_path: Path) -> None:
    for text, word in (
        ("{", "readable"),
        ("{}", "vocab_size"),
        ('{"vocab_size": 9, "max_position_embeddings": 64}', "64"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(RollspecError, match=word):
            cost.limits(str(tmp_path))
    (tmp_path / store.FILE).write_text("{")
    with pytest.raises(HistoryError, match="refused"):
        cost.keep(tmp_path, CostModel(), {})


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
    assert s["arms"]["none"]["modelled_regret"] is None
    shown = tuned.table({**s, "runs": runs, "requests": 64, "oracle_table": table})
    assert shown.row_count == 5
    assert "perfect drafter 4.00x" in str(shown.caption) and "64: 0" in str(shown.caption)
    assert tuned.oracle_table([{"faults": {"x": 1}}]) == {}


def test_harm_compares_whole_jobs() -> None:
    own = tuned_epochs(1.01)
    for e in own:
        e |= {"ceiling": 0.01, "drafters_off": ["suffix@64"]}
    runs = {"none": [tuned_epochs(1.0)] * 6, "rollspec": [own] * 6}
    s = harm.summarise(runs)
    assert s["rollspec_over_none"]["median"] == pytest.approx(1.01) and s["verdict"] == "reached"
    assert s["drafted"] == 60 * 18 and s["plays"]["none"] == 180
    shown = harm.table({"useless": s})
    assert shown.row_count == 1 and "reached" in str(shown.caption)


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


# ---- a model of one's own -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["control", "cost", "harm", "rollout"])
def test_a_model_by_name_has_a_result_of_its_own(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def run(**given: Any) -> Path:
        seen.update(given)
        return tmp_path / "x.json"

    monkeypatch.setattr("examples.models.resolve", lambda model: tmp_path / model)
    monkeypatch.setattr(f"benchmarks.{name}.run", run)
    invoke = CliRunner().invoke
    assert invoke(bench_cli.command, [name, "--model", "smollm2", "--quick"]).exit_code == 0
    assert seen["model"] == tmp_path / "smollm2" and seen["out"] == harness.RESULTS / f"{name}-smollm2-quick.json"
    assert invoke(bench_cli.command, [name, "--model", "Qwen/Qwen3-0.6B"]).exit_code == 0
    assert seen["out"] == harness.RESULTS / f"{name}-qwen3-0.6b.json"
    assert invoke(bench_cli.command, [name, "--model", "smollm2", "--out", "mine.json"]).exit_code == 0
    assert seen["out"] == Path("mine.json")
    seen.clear()
    assert invoke(bench_cli.command, [name]).exit_code == 0
    assert "model" not in seen and seen["out"] is None


def test_a_model_that_cannot_be_used_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "run", lambda **_: pytest.fail("must not start"))
    result = CliRunner().invoke(bench_cli.command, ["cost", "--model", str(tmp_path)])
    assert isinstance(result.exception, RollspecError) and "config.json" in str(result.exception)


def test_prompts_of_a_model_that_comes_with_none(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from examples.grpo_arithmetic.tokenizer import build_tokenizer, prompt_text

    tokenizer = build_tokenizer()
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda path: tokenizer)
    policy = drift.Drift("m", "", [""], "")
    texts = [tokenizer.decode(p) for p in rollout.first_prompts(policy, 2)]
    assert texts == [prompt_text(text) for text in rollout.INSTRUCTIONS[:2]]
    assert len(rollout.INSTRUCTIONS) == rollout.PROMPTS
    tokenizer.chat_template = None
    assert tokenizer.decode(rollout.first_prompts(policy, 1)[0]) == rollout.INSTRUCTIONS[0]


def test_bandits_write_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandits, "SEEDS", 2)
    found = json.loads(bandits.run(quick=True, out=tmp_path / "b.json").read_text())
    assert set(found["environments"]["stationary"]) == {bandits.FIXED, *bandits.POLICIES}


def test_options_of_the_new_benchmarks() -> None:
    invoke = CliRunner().invoke
    for name, options in (("cost", ("--model", "--store", "--rounds")), ("tuner", ("--rounds", "--policies")),
                          ("harm", ("--model", "--rounds")), ("bandits", ())):  # fmt: skip
        shown = invoke(bench_cli.command, [name, "--help"], env={"COLUMNS": "200"}).output
        assert all(o in shown for o in ("--quick", "--out", "--json", *options)), shown
    refused = invoke(bench_cli.command, ["tuner", "--policies", "edge"])
    assert isinstance(refused.exception, RollspecError) and "edge" in str(refused.exception)


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


def test_jobs_of_the_reuse_benchmark_differ_in_rollspec_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verl")
    manifest = tmp_path / "m.json"
    manifest.write_text("{}")
    assets = drift.Assets("model", "train", "val", "reward", str(manifest))
    monkeypatch.setattr(reuse, "prepare_assets", lambda *_: assets)
    found = {arm: j for arm, _, j in reuse.jobs((3,), tuple(reuse.ARMS), tmp_path)}
    commands = {
        arm: [c for c in j.command if "experiment_name" not in c and "local_dir" not in c] for arm, j in found.items()
    }
    differ = {
        tuple(i for i, (a, b) in enumerate(zip(commands["none"], c, strict=True)) if a != b) for c in commands.values()
    }
    assert len(differ - {()}) == 1 and len(next(iter(differ - {()}))) == 1
    (at,) = next(iter(differ - {()}))
    assert "reuse:{mode:'coupled'" in commands["coupled"][at] and "seed:3" in commands["coupled"][at]
    assert "mode:'lenient'" in commands["lenient, bias 0"][at] and "bias:0.0" in commands["lenient, bias 0"][at]
    assert "mode:'lenient'" not in commands["independent"][at] and len({j.folder for j in found.values()}) == 5


def test_the_reuse_benchmark_pools_finished_jobs_of_its_own_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = tmp_path / "m.json"
    manifest.write_text("{}")
    assets = drift.Assets("model", "train", "val", "reward", str(manifest))
    monkeypatch.setattr(reuse, "prepare_assets", lambda *_: assets)
    for seed in (0, 1):
        for arm, _, made in reuse.jobs((seed,), ("none", "coupled"), tmp_path):
            made.folder.mkdir(parents=True)
            same = made.settings_hash if (arm, seed) != ("coupled", 1) else "another"
            status = "finished" if (arm, seed) != ("none", 1) else "failed"
            (made.folder / "run.json").write_text(json.dumps({"settings_hash": same, "status": status}))
            (made.folder / "metrics.jsonl").write_text("")
    found = jobs.finished(reuse.jobs(jobs.seeds_in(tmp_path), tuple(reuse.ARMS), tmp_path), Console())
    assert [(arm, seed) for arm, seed, _ in found] == [("none", 0), ("coupled", 0)]
    said = capsys.readouterr().out
    assert "seed 1, none: unfinished or of other settings" in said and "seed 1, coupled: unfinished" in said


@pytest.mark.parametrize(("args", "says"), [(["--seeds", "x"], "--seeds 'x'"), (["--arms", "nothing"], "'nothing'")])
def test_reuse_refuses_what_it_does_not_know(args: list[str], says: str) -> None:
    result = CliRunner().invoke(bench_cli.command, ["reuse", *args])
    assert isinstance(result.exception, RollspecError) and says in str(result.exception)


# ---- the audit's power ----------------------------------------------------------------------------------------------


def test_false_alarms_add_up_with_an_exact_limit() -> None:
    part = audit_power.false_alarms(3, 0)
    assert part["audits"] == 3 and part["tokens"] == 3 * 2560
    found = audit_power.rates([{"audits": 3000, "alarms": {"0.001": 0}}, {"audits": 1000, "alarms": {"0.001": 1}}])
    assert found["audits"] == 4000 and found["by_alpha"]["0.001"]["rate"] == 1 / 4000
    assert 0.001 < found["by_alpha"]["0.001"]["upper_95"] < 0.0013


def test_planted_faults_are_one_percent() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("vllm")
    from benchmarks import planted

    logits = 2.0 * torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    p = logits.softmax(-1)
    for fault in ("Uniform", "MostLikely", "Second"):
        q = getattr(planted, fault)(None, None, False).apply(logits).softmax(-1)
        assert (0.5 * (p - q).abs().sum(-1) <= 0.01 + 1e-6).all() and (0.5 * (p - q).abs().sum(-1) > 0.001).all()
        assert fault == "Second" or (q.argmax(-1) == p.argmax(-1)).all()


WAITS = ("preempt_seconds", "preempt_p99_seconds", "micro_step_seconds", "learned_length")


def _long_job(gen: float, step: float, trained: bool = False, lengths: int = 5) -> dict[str, Any]:
    steps, epochs = 16, [e for e in range(4) for _ in range(4)]
    found: dict[str, Any] = {"epoch": epochs, "lengths": [[lengths]] * steps}
    found |= {name: [0.0] * steps for name in (*long_tail.COUNTS, "faults", *WAITS)}
    found |= {"gen": [gen] * steps, "step": [step] * steps}
    if trained:
        found |= {"idle_seconds": [2.0] * steps, "harvested_seconds": [1.5] * steps, "train_steps": [3.0] * steps}
    return found


def test_long_tail_compares_steps_of_the_same_work() -> None:
    runs = {
        "suffix": {0: _long_job(12.0, 30.0)},
        "long_tail": {0: _long_job(10.0, 28.0, trained=True)},
        "trained, never swapped": {0: _long_job(11.0, 30.3, trained=True)},
        "not trained": {0: _long_job(11.0, 30.0, lengths=6)},
    }
    summary = long_tail.summarise(runs)
    gain, cost_ = summary["learned_and_suffix_over_suffix"], summary["training_while_idle"]
    assert gain["second half"]["pairs"].median == pytest.approx(1.2) and gain["second half"]["verdict"] == "reached"
    assert gain["first epoch"]["pairs"].n == 4 and gain["second half"]["pairs"].n == 8 and gain["same_lengths"] == 1.0
    assert cost_["all"]["sums"] == pytest.approx(1.01) and cost_["same_lengths"] == 0.0
    assert summary["arms"]["long_tail"]["harvest"] == pytest.approx(0.75)
    assert summary["arms"]["suffix"]["harvest"] is None
    assert "48 training steps" in str(long_tail.table(summary).caption)
    assert long_tail.summarise({"suffix": runs["suffix"]})["learned_and_suffix_over_suffix"] is None


def test_long_tail_refuses_an_arm_it_does_not_know() -> None:
    done = CliRunner().invoke(bench_cli.command, ["long-tail", "--arms", "none"])
    assert isinstance(done.exception, RollspecError) and "--arms has 'none'" in str(done.exception)
