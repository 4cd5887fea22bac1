"""The benchmarks' arithmetic and their commands: pairs, rollouts, heads, the sweep of costs, the audit's power."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_target import filled, target
from typer.testing import CliRunner

from benchmarks import (
    audit_power,
    bandits,
    cost,
    cost_table,
    draws,
    drift,
    harness,
    head,
    head_prompts,
    head_table,
    propose,
    recipes,
    rollout,
    rollout_table,
)
from benchmarks import cli as bench_cli
from drafter_online.buffer import Buffer
from drafter_online.head import fresh, save
from drafter_online.held_out import split
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
        counts = {source: [9, 2 * accepted, accepted]} if source else {}
        one = {"tokens": 100, "drafted": 2 * accepted, "accepted": accepted, "by_source": counts}
        predicted = {source: 1.5 * accepted} if source else {}
        return [{**one, "seconds": s, "cpu_seconds": 3.0, "predicted_by": predicted} for s in (seconds, seconds / 2)]

    runs = {
        "none": [round_of(4.0, 0, None)] * 2,
        "memory": [round_of(4.0, 5, "suffix")] * 2,
        "head": [round_of(2.0, 50, "eagle3")] * 2,
    }
    s = head_table.summarise(runs, head.workloads(2))
    assert (
        s["fresh"]["head"]["speedup_over_none"]["median"] == s["repeated"]["head"]["speedup_over_memory"]["median"] == 2
    )
    assert s["fresh"]["head"]["acceptance_length"] == 2.0 and s["fresh"]["none"]["acceptance_rate"] is None
    assert s["fresh"]["head"]["by_source"] == {"eagle3": [18, 200, 100]}
    assert s["fresh"]["head"]["speedup_over_none_cpu"]["median"] == 1.0
    assert s["fresh"]["head"]["calibration"]["all"]["ratio"] == 1.5 and s["fresh"]["none"]["calibration"] == {
        "all": {"predicted": 0, "drafted": 0, "accepted": 0, "ratio": None}
    }
    assert head_table.table(4, s).row_count == 6
    assert head.workloads(1) == ("fresh",) and head.workloads(4)[2:] == ("repeated 2", "repeated 3")


def test_prompts_that_a_head_was_trained_on_are_known_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [[7, i] for i in range(12)]
    keys = [head_prompts.prompt_key(p) for p in ids]
    buffer, model = Buffer(), target(tmp_path)
    for i in range(8):
        buffer.add(dataclasses.replace(filled(model, 1).__iter__().__next__(), prompt_key=keys[i]))
    folder = tmp_path / "head"
    buffer.save(folder / "buffer")
    (folder / "make-head.json").write_text('{"hold_out": 0.25}')
    held = {s.prompt_key for s in split(buffer, 0.25)[1]}
    assert held and head_prompts.trained_on(folder) == set(keys[:8]) - held
    assert head_prompts.trained_on(tmp_path / "other") is None
    monkeypatch.setattr(head_prompts.prompts, "tokenized", lambda rows, model, room: (ids, 0))
    every, fresh = (head_prompts.Prompts.of(model, None, folder, given) for given in (None, folder))
    assert every.facts(every.order(0, 13)) == {
        "prompts_used": 12, "prompts_trained_on": 8 - len(held), "prompts_used_again": 1
    }  # fmt: skip
    assert len(fresh.found) == 4 + len(held) and fresh.facts(fresh.order(1, 4))["prompts_trained_on"] == 0
    assert fresh.order(1, 4) != fresh.order(2, 4)
    with pytest.raises(RollspecError, match=r"has no samples in buffer/"):
        head_prompts.Prompts.of(model, None, folder, tmp_path)


def test_recipes_train_from_one_folder_and_are_measured_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, model = tmp_path / "head", target(tmp_path)
    filled(model, 12).save(folder / "buffer")
    record = {"target": str(model), "aux_layers": [1, 2, 3], "temperature": 1.0}
    (folder / "make-head.json").write_text(json.dumps(record))
    monkeypatch.setattr(recipes, "STEPS", 2)
    out = recipes.run(folder, ["default", "random start"], (0,), 0.2, 40, out=tmp_path / "out.json")
    found = json.loads(out.read_text())["arms"]
    assert list(found) == ["default", "random start"]
    for runs in found.values():
        curve = runs["0"]["curve"]
        assert 1 < len(curve) <= recipes.LOOKS + 1 and curve[-1]["cpu_seconds"] >= 0.2
        assert 1.0 <= curve[-1]["acceptance_length"] <= 3.0 and runs["0"]["ceiling"] == found["default"]["0"]["ceiling"]


def test_draws_of_a_head_are_accepted_by_their_rule(tmp_path: Path) -> None:
    p = torch.tensor([[0.6, 0.3, 0.1], [0.5, 0.5, 0.0]]).log()
    q = torch.tensor([[0.6, 0.3, 0.1], [0.0, 0.0, 1.0]]).log()
    greedy, noise, probabilistic, bound = draws.rates(p, q)
    assert greedy.tolist() == pytest.approx([0.6, 0.0]) and bound.tolist() == pytest.approx([0.6, 0.5])
    assert noise.tolist() == [1.0, 0.0] and probabilistic.tolist() == pytest.approx([1.0, 0.0])

    folder, model = tmp_path / "head", target(tmp_path)
    save(fresh(model, aux=(1, 2, 3), seed=0), folder)
    filled(model, 12).save(folder / "buffer")
    (folder / "make-head.json").write_text(json.dumps({"target": str(model), "aux_layers": [1, 2, 3]}))
    found = json.loads(draws.run([folder], tmp_path / "out.json").read_text())["heads"]["head"]
    lengths = found["acceptance_length"]
    assert (
        found["drafts"] > 0 and 1.0 <= lengths["greedy"] <= lengths["bound"] and lengths["noise"] <= 1.0 + draws.STEPS
    )


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
    tuning, problem = store.load(tmp_path, machine)
    assert problem is None and tuning is not None
    c = RollspecConfig.load("default")
    again = Tuner(c.tuning, c.proposal.k_max, c.proposal.drafters)
    again.restore(tuning["tuner"])
    assert again.cost.fitted and again.cost.seconds(64) == pytest.approx(model.seconds(64), rel=0.05)
    # What the job learned meanwhile is kept when the sweep is made again.
    tuning["tuner"]["seen"] = 40
    store.save(tmp_path, tuning, machine)
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
        q = getattr(planted, fault)(None, None).apply(logits, None).softmax(-1)
        assert (0.5 * (p - q).abs().sum(-1) <= 0.01 + 1e-6).all() and (0.5 * (p - q).abs().sum(-1) > 0.001).all()
        assert fault == "Second" or (q.argmax(-1) == p.argmax(-1)).all()
