from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import harness, propose
from rollspec.bench_cli import command
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


def test_summary_compares_later_epochs_with_the_best_suffix() -> None:
    from benchmarks.rollout import arm, summarise, table

    def epochs(seconds: float, accepted: int) -> list[dict[str, float | None]]:
        return [
            {"seconds": seconds * (2 if e == 0 else 1), "tokens": 100, "accepted": accepted, "drafted": 2 * accepted,
             "propose_share": 0.02}
            for e in range(3)
        ]  # fmt: skip

    arms = [arm("none"), arm("ngram", 2), arm("suffix", 4), arm("rollspec")]
    runs = {
        "none": [epochs(4.0, 0)],
        "ngram K=2": [epochs(5.0, 10)],
        "suffix K=4": [epochs(3.0, 40)],
        "rollspec": [epochs(2.0, 60)],
    }
    s = summarise(arms, runs)
    assert s["arms"]["rollspec"]["speedup_later_epochs"]["median"] == pytest.approx(2.0)
    assert s["rollspec_over_suffix"]["median"] == pytest.approx(1.5)
    assert s["oracle_speedup"]["median"] == pytest.approx(2.0)
    assert s["arms"]["rollspec"]["acceptance_length"] == pytest.approx(2.5)
    assert table(8, s).row_count == 4


@pytest.mark.parametrize("bad", ["x", "0", "1,99"])
def test_batches_that_cannot_be_run(bad: str) -> None:
    result = CliRunner().invoke(command, ["rollout", "--batches", bad])
    assert isinstance(result.exception, RollspecError) and bad in str(result.exception)
