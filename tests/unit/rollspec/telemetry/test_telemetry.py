"""Sinks, the metric table and its page."""

from __future__ import annotations

import json
import logging
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from rollspec.telemetry.engine_stats import EngineStats
from rollspec.telemetry.faults import Faults
from rollspec.telemetry.metrics import TABLE, find, to_metrics
from rollspec.telemetry.sinks import JsonlSink, plain
from scripts.generate import metrics


def test_docs_page_is_up_to_date() -> None:
    assert metrics.FILE.read_text() == metrics.render(), "run `python -m scripts.generate`"


def test_every_metric_is_in_the_page_once() -> None:
    text = metrics.render()
    for row in TABLE:
        assert text.count(f"| `{row.name}` |") == 1


def test_everything_emitted_has_a_row() -> None:
    stats = EngineStats(
        steps=2, step_seconds=1.0, requests=4, verified=3, drafted=6, accepted=3, emitted=7,
        by_position=[[3, 2], [2, 1]], by_source={"suffix": [3, 6, 3]}, faults={"history/save": 2},
    )  # fmt: skip
    emitted = to_metrics(stats)
    assert [name for name in emitted if find(name) is None] == []
    assert emitted["rollspec/faults/history.save"] == 2
    assert find("rollspec/accept/rate/suffix").name == "rollspec/accept/rate/<drafter>"
    assert find("rollspec/nothing") is None


def replica(drafted: int, steps: int, **levels: float) -> EngineStats:
    return EngineStats(
        by_source={"suffix": [9, 999, 9], "eagle3": [1, drafted, 1]},
        drafter={"train_steps": steps},
        drafter_levels=levels,
    )


def test_levels_of_replicas_that_train_a_head_each() -> None:
    a = replica(30, 10, accept_length=1.0, loss=4.0, **{"loss/accept_0": 1.0}, preempt_seconds=0.5, staleness=1.0,
                version=7)  # fmt: skip
    b = replica(10, 30, accept_length=3.0, loss=2.0, **{"loss/accept_0": 3.0}, preempt_seconds=0.1, staleness=4.0,
                version=8)  # fmt: skip
    c = replica(0, 0, accept_length=9.0, loss=9.0, step_age_seconds=200.0)  # did neither: an old level
    d = replica(50, 0)  # drafts, and has none
    levels = EngineStats.merge([a, b, c, d]).drafter_levels
    assert levels == {
        "accept_length": 1.5, "loss": 2.5, "loss/accept_0": 2.5, "preempt_seconds": 0.5, "staleness": 4.0,
        "step_age_seconds": 200.0, "version": 7,
    }  # fmt: skip
    assert EngineStats.merge([EngineStats.merge([a, b]), c]).drafter_levels == pytest.approx(levels)
    metrics = to_metrics(EngineStats.merge([a, b]))
    assert metrics["rollspec/drafter/loss/accept_0"] == 2.5 and metrics["rollspec/drafter/accept_length"] == 1.5
    assert find("rollspec/drafter/loss/accept_0").name == "rollspec/drafter/loss/<term>"
    assert find("rollspec/drafter/loss").name == "rollspec/drafter/loss"
    still = EngineStats.merge([replica(0, 0, loss=4.0), replica(0, 0, loss=2.0)]).drafter_levels
    assert still == {"loss": 3.0}, "where nothing is new, all count the same"


def test_sink_appends_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "new" / "m.jsonl"
    assert JsonlSink(path).write({"a": 1, "b": np.float32(0.5), "c": np.arange(3), "d": math.nan})
    assert JsonlSink(path).write({"a": 2})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"a": 1, "b": 0.5, "c": [0, 1, 2], "d": None},
        {"a": 2},
    ]


def test_sink_closes_a_torn_line_of_an_earlier_crash(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"a": 1}\n{"a": 2, "b"')
    JsonlSink(path).write({"a": 3})
    assert path.read_text().splitlines() == ['{"a": 1}', '{"a": 2, "b"', '{"a":3}']


def test_sink_survives_an_unwritable_path_with_one_sentence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    sink = JsonlSink(tmp_path / "file" / "m.jsonl")  # its folder is a file
    with caplog.at_level(logging.WARNING):
        assert [sink.write({"a": 1}) for _ in range(3)] == [False] * 3
    assert len(caplog.records) == 1 and "cannot be written" in caplog.text


def test_sink_survives_a_full_disk() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    assert not JsonlSink("/dev/full").write({"a": 1})


def test_writers_do_not_mix_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: JsonlSink(path).write({"i": i, "pad": "x" * 3000}), range(64)))
    assert sorted(json.loads(line)["i"] for line in path.read_text().splitlines() if line) == list(range(64))


def test_plain_makes_strict_json() -> None:
    value = plain({"t": (1, {2}), 3: np.int64(4), "inf": math.inf, "p": Path("x"), "n": None, "b": np.bool_(True)})
    assert value == {"t": [1, [2]], "3": 4, "inf": None, "p": "x", "n": None, "b": True}
    json.dumps(value, allow_nan=False)


def test_a_fault_is_counted_always_and_said_once() -> None:
    said: list[str] = []
    faults = Faults(said.append)
    for _ in range(2):
        with faults.left_out("saving"):
            raise OSError("100% full")
    faults.record("quiet")
    assert faults.drain() == {"saving": 2, "quiet": 1} and faults.drain() == {}
    faults.record("saving", "again")
    assert said == ["rollspec: saving failed and is left out (OSError: 100% full)."]
