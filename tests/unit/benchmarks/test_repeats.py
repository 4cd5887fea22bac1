"""Pairs of runs of one job: what two runs without rollspec differ by is the measure of a shift with it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from report_samples import rows, write_run
from typer.testing import CliRunner

from benchmarks import cli as bench_cli
from benchmarks import repeats
from examples.demo import cli
from rollspec.telemetry.runs import load_run


def test_a_shift_is_beyond_what_pairs_without_rollspec_differ_by() -> None:
    same = repeats.shift([1.0, -2.0, 1.5, -0.5], [1.0, -1.5, 0.8, 0.1])
    assert not same["shifted"] and same["spread"] == pytest.approx((7.5 / 4) ** 0.5)
    moved = repeats.shift([1.0, -2.0, 1.5, -0.5], [-5.0, -4.0, -6.0, -5.5])
    assert moved["shifted"] and moved["shift"] == pytest.approx(-5.125)
    assert "shift" not in repeats.shift([1.0], [2.0]), "one pair has no spread"


def test_runs_become_pairs_and_the_demo_finds_those_of_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that differs in anything but its seed gets none."""

    def jobs(seeds: list[int], arms: tuple[str, ...], work: Path, settings: object, build: object) -> list[object]:
        found = []
        for seed in seeds:
            for k, arm in enumerate(arms):
                folder = write_run(work / f"seed-{seed}" / arm, rows(arm == "with", seed=10 * seed + k))
                found.append((arm, seed, SimpleNamespace(folder=folder, settings_hash="h", total_steps=18)))
        return found

    monkeypatch.setattr(repeats, "of_seeds", jobs)
    monkeypatch.setattr("benchmarks.jobs.finished_run", lambda folder, settings_hash: True)
    path = tmp_path / "repeats.json"
    asked = ["repeats", "--seeds", "0,1,2", "--work", str(tmp_path / "work"), "--out", str(path)]
    assert CliRunner().invoke(bench_cli.command, asked, catch_exceptions=False).exit_code == 0
    result = json.loads(path.read_text())
    assert result["seeds"] == [0, 1, 2] and [len(g) for g in result["groups"]] == [2, 2, 2]
    one, other = (load_run(tmp_path / "work" / "seed-1" / arm) for arm in ("without", "again"))
    gaps = [b - a for a, b in zip(*(r.known("response_length/mean") for r in (one, other)), strict=True)]
    assert result["length"]["without"][1] == pytest.approx(sum(gaps) / len(gaps))
    assert len(result["reward"]["with"]) == 3 and "shifted" in result["reward"]

    monkeypatch.setattr(cli, "RESULTS", tmp_path)
    for name, change in (("same", {"seed": 9}), ("other", {"n": 2})):
        baseline = write_run(tmp_path / name, rows(False))
        (baseline / "run.json").write_text(json.dumps({"settings": {**result["settings"], **change}}))
        cli.add_repeats(baseline)
    assert len(load_run(tmp_path / "same").repeats) == 3
    assert not load_run(tmp_path / "other").repeats
