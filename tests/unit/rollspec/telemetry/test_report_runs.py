"""Reading runs: every format that is written, a note where something is left out, one sentence on bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from report_samples import rows, write_run

from rollspec.errors import RollspecError
from rollspec.telemetry.runs import load_run


def test_file_logger_format_and_numeric_names(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    folder.mkdir()
    lines = [{"step": 0, "data": {"val-core/acc": 0.1}}] + [
        {"step": i + 1, "data": {k: v for k, v in row.items() if k != "training/global_step"}}
        for i, row in enumerate(rows(True))
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = load_run(folder)
    assert run.steps == tuple(range(1, 19))
    assert run.names("rollspec/accept/position/")[8:10] == [f"rollspec/accept/position/{i}" for i in (9, 10)]
    assert any("no run.json" in note for note in run.notes)


def test_torn_last_line_is_left_out_with_a_note(demo: Path) -> None:
    path = demo / "rollspec" / "metrics.jsonl"
    path.write_text(path.read_text()[:-40])
    run = load_run(demo / "rollspec")
    assert len(run.steps) == 17 and "Line 18" in run.notes[0]


def test_bad_input_is_one_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def message() -> str:
        with pytest.raises(RollspecError) as caught:
            load_run(folder)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "no run folder" in message()
    folder.mkdir()
    assert "metrics.jsonl does not exist" in message()
    path = folder / "metrics.jsonl"
    path.write_text("")
    assert "holds no training step" in message()
    path.write_text('{"timing_s/gen": 1}\n{"timing_s/gen": \n{"timing_s/gen": 1}\n')
    assert "metrics.jsonl, line 2, is not valid JSON" in message()
    path.write_bytes(b'{"timing_s/gen": 1}\n\xff\xfe\n')
    assert "line 2" in message()
    path.write_text("[1, 2]\n")
    assert "line 1, holds list" in message()
    path.write_text('{"step": 0, "data": {"val/acc": 1}}\n')
    assert "holds no training step" in message()
    path.write_text('{"timing_s/gen": 1}\n')
    (folder / "run.json").write_text("{")
    assert "run.json cannot be read" in message()


def test_lengths_come_from_their_own_file(tmp_path: Path) -> None:
    rows = [{"step": s, "data": {"training/global_step": s, "timing_s/gen": 1.0}} for s in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "lengths.jsonl").write_text('{"step":2,"lengths":[3,4]}\n{"step":3,"lengths":[9]}\n')
    run = load_run(tmp_path)
    assert run.lengths == ((), (3, 4))
    with (tmp_path / "lengths.jsonl").open("a") as f:
        f.write('{"step":1,"len')
    assert "Line 3 of lengths.jsonl was cut off in the middle and is left out." in load_run(tmp_path).notes


def test_lengths_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    write_run(tmp_path, rows(True)[:2])
    (tmp_path / "lengths.jsonl").write_text('{"step":1,"lengths":5}\n{"step":2,"lengths":[3,"x",null,4]}\n')
    assert load_run(tmp_path).lengths == ((), (3, 4))
