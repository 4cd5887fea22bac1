"""The benchmarks' arithmetic and their commands: pairs, rollouts, models by name, the audit's power."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from benchmarks import (
    audit_power,
    bandits,
    cost,
    drift,
    harness,
    propose,
    tuner,
    turns,
)
from benchmarks import cli as bench_cli
from benchmarks.engines import Arm, Work
from drafter_online.errors import TrainingError
from rollspec.errors import RollspecError


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


def test_every_epoch_has_the_same_prompts_and_its_own_weights() -> None:
    class Counts:
        def __init__(self) -> None:
            self.works: list[Any] = []

        def run(self, work: Any) -> dict[str, Any]:
            self.works.append(work)
            return {"lengths": [3 + work.version] * len(work.prompts)}

    engine, load = Counts(), tuner.Load(drift.Drift("", "", [], ""), [[p, p] for p in range(8)], ["v0", "v1"])
    load.record(engine)  # type: ignore[arg-type]
    load.epochs(engine)  # type: ignore[arg-type]
    first, second = engine.works[2:]
    assert first.prompts == second.prompts and sorted(p[0] for p in first.prompts) == sorted([*range(8)] * 8)
    assert (first.lengths, second.lengths) == ([3] * 64, [4] * 64)
    assert first.reset and not second.reset and (first.weights, second.weights) == ("v0", "v1")


def test_help_lists_every_benchmark() -> None:
    out = CliRunner().invoke(bench_cli.command, ["--help"]).output
    assert all(name in out for name in (*bench_cli.NAMES, "all"))


@pytest.mark.parametrize("bad", ["x", "0", "1,99"])
def test_batches_that_cannot_be_run(bad: str) -> None:
    result = CliRunner().invoke(bench_cli.command, ["harm", "--batches", bad])
    assert isinstance(result.exception, RollspecError) and bad in str(result.exception)


def test_prompts_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise TrainingError("--prompts x holds no prompt; give one per line.")

    monkeypatch.setattr("benchmarks.peers.run", refuse)
    result = CliRunner().invoke(bench_cli.command, ["peers"])
    assert isinstance(result.exception, RollspecError)
    assert str(result.exception) == "rollspec: --prompts x holds no prompt; give one per line."


def test_a_verdict_needs_the_whole_interval_and_six_pairs() -> None:
    def found(*pairs: float) -> harness.Ratio:
        return harness.ratio(pairs, [1.0] * len(pairs))

    assert harness.verdict(found(*[1.01] * 6), 1.02) == "reached"
    assert harness.verdict(found(*[1.05] * 6), 1.02) == "missed"
    assert harness.verdict(found(*[1.00, 1.05] * 4), 1.02) == "undecided"
    assert harness.verdict(found(*[1.01] * 5), 1.02) == "undecided"
    assert harness.verdict(found(*[1.10] * 6), 1.05, most=False) == "reached"
    assert harness.verdict(found(*[1.01] * 6), 1.05, most=False) == "missed"


# ---- engines that take turns ----------------------------------------------------------------------------------------


class Fake:
    """An engine that is as slow as its start made it, and slower in its first two turns."""

    log: ClassVar[list[str]] = []

    def __init__(self, arm: Arm, model: str, max_len: int) -> None:
        self.arm, self.turns, self.running = arm, 0, True
        self.luck = len(self.log)
        self.log.append(f"start {arm.name}")

    def run(self, work: Work) -> dict[str, float]:
        assert self.running
        self.turns += 1
        self.log.append(f"turn {self.arm.name}")
        return {"seconds": self.luck + 100 * (self.turns <= 2) + 0.1 * self.turns}

    def suspend(self) -> None:
        self.running = False

    def resume(self) -> None:
        self.running = True

    def close(self) -> None:
        self.log.append(f"close {self.arm.name}")


def test_every_pair_has_engines_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "Engine", Fake)
    monkeypatch.setattr(Fake, "log", log := [])
    work = Work([[1]], [4], 1, 0)
    arms = [Arm("off"), Arm("on")]
    found = turns.anew(2, arms, "model", 64, lambda live: turns.alternate(live, {1: work}, 3))
    assert [line for line in log if not line.startswith("turn")] == [
        "start off", "start on", "close off", "close on", "start on", "start off", "close on", "close off",
    ]  # fmt: skip
    assert [line[5:] for line in log[2:12]] == ["off", "on", "on", "off"] * 2 + ["off", "on"]
    # Of three turns that count, the fourth of all is the median; the second start was luckier for neither.
    lucks = [i for i, line in enumerate(log) if line.startswith("start")]
    assert found == {"off": {1: [lucks[0] + 0.4, lucks[3] + 0.4]}, "on": {1: [lucks[1] + 0.4, lucks[2] + 0.4]}}

    def fails(live: list[Any]) -> Any:
        raise RuntimeError("it ended")

    log.clear()
    with pytest.raises(RuntimeError, match="it ended"):
        turns.anew(2, arms, "model", 64, fails)
    assert log == ["start off", "start on", "close off", "close on"]


# ---- a model of one's own -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["control", "cost", "harm"])
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
    texts = [tokenizer.decode(p) for p in drift.first_prompts(policy, 2)]
    assert texts == [prompt_text(text) for text in drift.INSTRUCTIONS[:2]]
    assert len(drift.INSTRUCTIONS) == drift.PROMPTS
    tokenizer.chat_template = None
    assert tokenizer.decode(drift.first_prompts(policy, 1)[0]) == drift.INSTRUCTIONS[0]


def test_bandits_write_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandits, "SEEDS", 2)
    found = json.loads(bandits.run(quick=True, out=tmp_path / "b.json").read_text())
    assert set(found["environments"]["stationary"]) == {bandits.FIXED, *bandits.STRATEGIES}


def test_options_of_the_new_benchmarks() -> None:
    invoke = CliRunner().invoke
    for name, options in (("cost", ("--model", "--store", "--rounds")), ("tuner", ("--rounds", "--strategies")),
                          ("harm", ("--model", "--rounds")), ("bandits", ())):  # fmt: skip
        shown = invoke(bench_cli.command, [name, "--help"], env={"COLUMNS": "200"}).output
        assert all(o in shown for o in ("--quick", "--out", "--json", *options)), shown
    refused = invoke(bench_cli.command, ["tuner", "--strategies", "edge"])
    assert isinstance(refused.exception, RollspecError) and "edge" in str(refused.exception)


# ---- the audit's power ----------------------------------------------------------------------------------------------


def test_false_alarms_add_up_with_an_exact_limit() -> None:
    part = audit_power.false_alarms(3, 0)
    assert part["audits"] == 3 and part["tokens"] == 3 * 2560
    found = audit_power.rates([{"audits": 3000, "alarms": {"0.001": 0}}, {"audits": 1000, "alarms": {"0.001": 1}}])
    assert found["audits"] == 4000 and found["by_alpha"]["0.001"]["rate"] == 1 / 4000
    assert 0.001 < found["by_alpha"]["0.001"]["upper_95"] < 0.0013
