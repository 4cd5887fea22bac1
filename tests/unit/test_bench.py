from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import drift, harness, propose, rollout, rollout_table
from rollspec import bench_cli
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


def epochs(seconds: float, accepted: int) -> list[dict[str, Any]]:
    return [
        {"seconds": seconds * (2 if e == 0 else 1), "tokens": 100, "accepted": accepted, "drafted": 2 * accepted,
         "steps": 50, "after_end": 5, "propose_share": 0.02}
        for e in range(3)
    ]  # fmt: skip


RUNS = {
    "none": [epochs(4.0, 0)],
    "ngram K=2": [epochs(5.0, 10)],
    "suffix K=4": [epochs(3.0, 40)],
    "rollspec": [epochs(2.0, 60)],
}


def test_summary_compares_later_epochs_with_the_best_suffix() -> None:
    s = rollout_table.summarise(RUNS)
    rollspec = s["arms"]["rollspec"]
    assert rollspec["speedup_later_epochs"]["median"] == pytest.approx(2.0)
    assert rollspec["speedup_all_epochs"]["median"] == pytest.approx(2.0)
    assert rollspec["acceptance_length"] == pytest.approx(2.5)
    assert rollspec["ms_per_step"] == pytest.approx(40.0)
    assert s["rollspec_over_suffix"]["median"] == pytest.approx(1.5)


def test_the_oracle_is_the_best_of_the_others() -> None:
    s = rollout_table.summarise(RUNS)
    assert s["oracle"]["arm"] == "suffix K=4"
    assert s["rollspec_over_oracle"]["median"] == pytest.approx(1.5)
    slow = {**RUNS, "suffix K=4": [epochs(4.5, 40)]}
    assert rollout_table.summarise(slow)["oracle"]["arm"] == "none"


def test_the_table_shows_the_limit_and_the_share_of_drafting() -> None:
    s = rollout_table.summarise(RUNS)
    bare = rollout_table.table(8, s)
    assert bare.row_count == 4
    full = rollout_table.table(
        8, s | {"perfect_drafter": {"k": 8, "seconds": 1.0}, "full_batch": {"propose_share": 0.021}}
    )
    assert full.row_count == 5
    assert "2.1 % of a step" in str(full.caption)


def test_arms_by_name() -> None:
    assert [a.name for a in (rollout.arm("none"), rollout.arm("suffix", 4), rollout.arm("perfect", 8))] == [
        "none",
        "suffix K=4",
        "perfect",
    ]
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


def test_an_installed_package_says_where_the_benchmarks_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench_cli, "ROOT", tmp_path)
    result = CliRunner().invoke(bench_cli.command, ["propose"])
    assert isinstance(result.exception, RollspecError) and "clone" in str(result.exception)


def test_help_lists_every_benchmark() -> None:
    out = CliRunner().invoke(bench_cli.command, ["--help"]).output
    assert all(name in out for name in (*bench_cli.NAMES, "all"))


@pytest.mark.parametrize("bad", ["x", "0", "1,99"])
def test_batches_that_cannot_be_run(bad: str) -> None:
    result = CliRunner().invoke(bench_cli.command, ["rollout", "--batches", bad])
    assert isinstance(result.exception, RollspecError) and bad in str(result.exception)
