"""`rollspec bench real`: what it makes first, what it leaves out, and that one failure does not end the rest."""

from __future__ import annotations

import contextlib
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import cli, real, stale
from rollspec.errors import RollspecError

ALL = [*real.FILES]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """Command lines of the programs that would run; each writes what it is asked for, and `harm` fails."""
    lines: list[list[str]] = []

    def call(self: real.Real, name: str, *arguments: object) -> None:
        lines.append([name, *map(str, arguments)])
        if name == "harm":
            raise RollspecError("rollspec: harm ended with status 1")
        if "bench" not in arguments:
            out = Path(str(arguments[arguments.index("--out") + 1]))
            out.mkdir(parents=True, exist_ok=True)
            (out / "config.json").write_text(json.dumps({"calls": len(lines)}))
            (out / "summary.json").write_text("{}")
            (out / "make-head.json").write_text("{}")

    monkeypatch.setattr(real.Real, "call", call)
    monkeypatch.setattr(real.Real, "prompts", lambda self, seed: f"{self.work}/prompts-{seed}.parquet")
    monkeypatch.setattr(real, "RESULTS", tmp_path / "results")
    (tmp_path / "results").mkdir()
    return lines


def test_models_and_heads_are_made_once_in_their_order(called: list[list[str]], tmp_path: Path) -> None:
    real.run(tmp_path / "work", "control")
    assert [line[0] for line in called] == ["warm", "later", "small", "head-weak", "head", "control"]
    heads = [json.loads((tmp_path / "work" / n / "config.json").read_text())["calls"] for n in ("head-weak", "head")]
    assert heads == [4, 5], "the weak head is a copy of the training half-way"
    minutes = [float(line[line.index("--minutes") + 1]) for line in called[:5]]
    assert minutes == [real.WARM, real.LATER, real.SMALL, real.WEAK, real.HEAD]
    called.clear()
    real.run(tmp_path / "work", "peers,control", minutes=7)
    assert [line[0] for line in called] == ["peers", "control"]
    assert called[0][called[0].index("--minutes") + 1] == "7"


def test_a_head_is_measured_on_other_prompts_than_its_own(called: list[list[str]], tmp_path: Path) -> None:
    real.run(tmp_path / "work", "head,peers,tuner")
    given = {line[0]: line[line.index("--prompts") + 1] for line in called if "--prompts" in line}
    assert given["head"] == given["peers"] == given["tuner"] != given["head-weak"]


def test_what_is_not_stale_is_left_out_and_the_rest_runs_though_one_fails(
    called: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: dict[str, Any] = {"peers": [], "control-smollm2": ["old"], "head": []}
    monkeypatch.setattr(stale, "reasons", lambda: known)
    with pytest.raises(RollspecError, match="harm ended"):
        real.run(tmp_path / "work")
    assert [line[0] for line in called][5:] == ["control", "tuner", "harm", "audit", "traffic", "training"]
    assert (tmp_path / "results" / "traffic-smollm2.json").is_file()
    assert (tmp_path / "results" / "make-head-tasks.json").is_file()
    made = json.loads((tmp_path / "results" / "make-head-tasks.json").read_text())
    assert made["provenance"]["git"], "the head's result names its commit, or it would always be stale"


@pytest.mark.parametrize("name", ["peers", "control", "head", "tuner", "harm", "training"])
def test_the_programs_take_these_options(
    name: str, called: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    real.run(tmp_path / "work", "control")
    called.clear()
    with contextlib.suppress(RollspecError):
        real.run(tmp_path / "work", name)
    monkeypatch.setattr(importlib.import_module(f"benchmarks.{name}"), "run", lambda *a, **given: seen.update(given))
    monkeypatch.setattr(cli, "_model", Path)
    monkeypatch.setattr(cli, "_done", lambda path, json: None)
    (line,) = called
    assert CliRunner().invoke(cli.command, line[line.index("bench") + 1 :], catch_exceptions=False).exit_code == 0
    assert seen["out"] == tmp_path / "results" / f"{real.FILES[name]}.json"


def test_an_unknown_benchmark_is_one_sentence(called: list[list[str]], tmp_path: Path) -> None:
    with pytest.raises(RollspecError, match="--only"):
        real.run(tmp_path / "work", "speed")
    assert not called


def test_a_program_that_fails_names_its_log(tmp_path: Path) -> None:
    with pytest.raises(RollspecError, match=r"status 3.*logs/x\.log"):
        real.Real(tmp_path).call("x", "-c", "print('seen'); raise SystemExit(3)")
    assert (tmp_path / "logs" / "x.log").read_text() == "seen\n"


def test_the_command_says_what_was_written(called: list[list[str]], tmp_path: Path) -> None:
    done = CliRunner().invoke(cli.command, ["real", "--work", str(tmp_path / "work"), "--only", "control"])
    assert done.exit_code == 0 and "control-smollm2.json" in done.output


def test_every_result_is_known_to_the_stale_check() -> None:
    assert {*real.FILES.values()} <= stale.MEASURES.keys()
