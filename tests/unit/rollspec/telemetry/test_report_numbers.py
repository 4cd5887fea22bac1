"""The numbers of the report, without a page: they agree with the rows that they come from."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_samples import rows

from rollspec.telemetry.runs import load_run
from rollspec.telemetry.summary import compare, ratio, summarize, t_critical, tokens_per_step


def test_numbers_agree_with_the_rows(demo: Path) -> None:
    run = load_run(demo / "rollspec")
    s = summarize(run)
    gen = [row["timing_s/gen"] for row in rows(True)]
    sizes = [n for row in rows(True) for n in row["lengths"]]
    assert s["gen_total"] == pytest.approx(sum(gen)) and s["tokens"] == sum(sizes)
    assert s["tokens_per_second"] == pytest.approx(sum(sizes) / sum(gen))
    assert s["epochs"] == 3 and s["length_max"] == max(sizes)
    base = load_run(demo / "baseline")
    c = compare(run, base)
    assert c["overall"]["value"] == pytest.approx(sum(row["timing_s/gen"] for row in rows(False)[1:]) / sum(gen[1:])), (
        "without the first step, which warms up"
    )
    assert c["overall"]["low"] < c["overall"]["value"] < c["overall"]["high"]
    assert list(c["by_epoch"]) == [0, 1, 2]


def test_ratio_interval() -> None:
    assert ratio([], []) is None and ratio([1.0], [0.0]) is None and ratio([None], [1.0]) is None
    assert ratio([2.0] * 5, [1.0] * 5) == {"value": 2.0, "low": 2.0, "high": 2.0, "steps": 5}
    assert ratio([4.0, None], [3.0, 1.0], [2.0, 1.0], [2.0, 1.0]) == {"value": 3.0, "low": 3.0, "high": 3.0, "steps": 1}


def test_the_bound_of_few_pairs_is_of_students_t() -> None:
    assert [t_critical(n) for n in (2, 5)] == pytest.approx([6.2053, 3.1634], abs=1e-4)  # two-sided, 97.5 %


def test_tokens_per_second_from_the_second_epoch_on(demo: Path) -> None:
    runs = [load_run(demo / name) for name in ("rollspec", "baseline")]
    speeds = []
    for run in runs:
        later = [i for i, e in enumerate(run.epochs) if e > run.epochs[0]]
        tokens, seconds = tokens_per_step(run), run.series("timing_s/gen")
        speeds.append(sum(tokens[i] or 0 for i in later) / sum(seconds[i] or 0 for i in later))
    found = compare(*runs)["later_tokens_per_second"]
    assert found["value"] == pytest.approx(speeds[0] / speeds[1])
    assert found["low"] < found["value"] < found["high"]
