"""Monitoring: Prometheus names, the Grafana dashboard, W&B's definitions and alerts, runs read from W&B and TRL."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from drafter_online.status import METRICS
from rollspec.errors import RollspecError
from rollspec.telemetry import wandb_run
from rollspec.telemetry.engine_stats import EngineStats
from rollspec.telemetry.metrics import TABLE, find, to_metrics
from rollspec.telemetry.prometheus import OF_THE_TRAINER, Exporter, series
from rollspec.telemetry.runs import load_run
from rollspec.telemetry.wandb_run import HARM_REPORTS, WandbWatch
from scripts.generate import __main__ as generate
from scripts.generate import grafana, wandb_workspace

STATS = EngineStats(
    steps=2, step_seconds=1.0, requests=4, verified=3, drafted=6, accepted=3, emitted=7, version=2, alarms=1,
    by_position=[[3, 2], [2, 1]], by_source={"suffix": [3, 6, 3]}, faults={"history": 2}, plays={"none": 1},
    modelled={"played": 1.0, "oracle": 0.9, "clairvoyant": 0.8, "perfect": 0.5, "fixed/none": 1.2},
)  # fmt: skip


def test_every_engine_metric_has_one_prometheus_name() -> None:
    names = [grafana.scraped(s) for s in series()]
    assert len(set(names)) == len(names) and all(n.replace("_", "").isalnum() for n in names)
    rows = {s.row.name for s in series()}
    assert all(find(name).name in rows for name in to_metrics(STATS))  # type: ignore[union-attr]
    left_out = {r.name for r in TABLE} - rows
    assert all(name.startswith(OF_THE_TRAINER) for name in left_out)


def test_counters_add_up_and_gauges_are_the_latest() -> None:
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    exporter = Exporter("m", registry)
    exporter.update(STATS)
    exporter.update(STATS)
    exporter.update(EngineStats())  # an idle interval
    Exporter("other", registry).update(STATS)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"model_name": "m", **labels})

    assert value("rollspec_accept_drafted_total") == 12
    assert value("rollspec_accept_rate") == 0.5
    assert value("rollspec_accept_rate_by_drafter", drafter="suffix") == 0.5
    assert value("rollspec_accept_position", position="1") == pytest.approx(2 / 3)
    assert value("rollspec_faults_total") == 4
    assert value("rollspec_faults_by_cause_total", cause="history") == 4
    assert value("rollspec_tuner_arm", arm="none") == 1


def test_several_api_servers_share_them(tmp_path: Path) -> None:
    """prometheus_client's multi-process mode, which vLLM uses with several API servers; it is chosen at import."""
    code = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from rollspec.telemetry.engine_stats import EngineStats
from rollspec.telemetry.prometheus import Exporter
Exporter("m").update(EngineStats(steps=1, drafted=6, accepted=3))
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
        env={**__import__("os").environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
    )  # fmt: skip
    assert out.returncode == 0, out.stderr
    assert 'rollspec_accept_drafted_total{model_name="m"} 6.0' in out.stdout
    assert 'rollspec_accept_rate{model_name="m"} 0.5' in out.stdout


def test_the_dashboard_is_up_to_date_and_whole() -> None:
    assert grafana.FILE.read_text() == grafana.render(), "run `python -m scripts.generate`"
    board = json.loads(grafana.render())
    asked = " ".join(t["expr"] for p in board["panels"] for t in p.get("targets", ()))
    assert all(f"{grafana.scraped(s)}{{" in asked for s in series())
    assert all(f"drafter_online_{m.name}" in asked for m in METRICS), "the drafter's daemon is on it, too"
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]]
    assert len(set(places)) == len(places)
    assert len({p["id"] for p in board["panels"]}) == len(board["panels"])


def test_the_workspace_is_up_to_date_and_names_metrics_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wandb_workspace.FILE.read_text() == wandb_workspace.render(), "run `python -m scripts.generate`"
    spec = json.loads(wandb_workspace.render())
    everything = [p for s in spec["sections"][1:] for p in s["panels"]]
    assert len(everything) == len(TABLE) and len({p["title"] for p in everything}) == len(TABLE)
    for p in (p for s in spec["sections"] for p in s["panels"]):
        assert p["meaning"] and all(find(name) for name in p.get("y", ()))
        assert ("y" in p) != ("regex" in p)
    arms = next(p for p in everything if p["title"] == "tuner/arm/<arm>")
    assert re.search(arms["regex"], "rollspec/tuner/arm/suffix:4") and not re.search(arms["regex"], "rollspec/tuner/x")
    trl = wandb_workspace.specification("train/")["sections"][0]["panels"]
    assert trl[2]["y"] == ["train/rollspec/accept/length"] and trl[4]["regex"].startswith("^train/rollspec/tuner")


class Made:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def save(self) -> Made:
        self.url = f"https://wandb.ai/{self.entity}/{self.project}"
        return self


def test_the_workspace_is_saved_by_wandbs_own_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[Made] = []

    def keep(**fields: Any) -> Made:
        made.append(Made(**fields))
        return made[-1]

    for name in ("wandb_workspaces", "wandb_workspaces.reports"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    reports, workspaces = ModuleType("wandb_workspaces.reports.v2"), ModuleType("wandb_workspaces.workspaces")
    reports.LinePlot, workspaces.Section, workspaces.Workspace = Made, Made, keep  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, reports.__name__, reports)
    monkeypatch.setitem(sys.modules, workspaces.__name__, workspaces)
    sys.modules["wandb_workspaces"].workspaces = workspaces  # type: ignore[attr-defined]
    sys.modules["wandb_workspaces.reports"].v2 = reports  # type: ignore[attr-defined]
    assert wandb_workspace.main(["--save", "me/project", "--prefix", "train/"]) == 0
    assert capsys.readouterr().out.strip() == "https://wandb.ai/me/project"
    first = made[0].sections[0].panels[2]
    assert first.y == ["train/rollspec/accept/length"] and first.x == "train/global_step"
    assert made[0].sections[0].is_open and len(made[0].sections) == len(wandb_workspace.specification()["sections"])


def test_without_wandbs_package_or_a_project_it_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    assert wandb_workspace.main(["--save", "me/project"]) == 2
    assert "pip install wandb-workspaces" in capsys.readouterr().err
    assert wandb_workspace.main(["--save", "project"]) == 2
    assert "ENTITY/PROJECT" in capsys.readouterr().err


def test_what_is_out_of_date_is_named_and_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert generate.main(["--check"]) == 0
    monkeypatch.setattr(grafana, "FILE", tmp_path / "grafana.json")
    assert generate.main(["--check"]) == 1
    assert "grafana.json is out of date" in capsys.readouterr().err
    assert generate.main([]) == 0 and generate.main(["--check"]) == 0
    assert grafana.FILE.read_text() == grafana.render()


def test_tensorboard_takes_every_metric(tmp_path: Path) -> None:
    """Names as verl's and transformers' loggers write them with torch's SummaryWriter, and read back."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    metrics = to_metrics(STATS)
    with SummaryWriter(tmp_path) as writer:
        for step in (1, 2):
            for name, value in metrics.items():
                writer.add_scalar(name, value, step)
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert set(read.Tags()["scalars"]) == set(metrics)
    assert [e.value for e in read.Scalars("rollspec/accept/rate")] == [0.5, 0.5]


# ---- W&B
# ---------------------------------------------------------------------------------------------------------------


class Run:
    id = "r"

    def __init__(self) -> None:
        self.defined: dict[str, Any] = {}
        self.alerts: list[str] = []

    def define_metric(self, name: str, **options: Any) -> None:
        self.defined[name] = options

    def alert(self, title: str, text: str, level: str, wait_duration: int) -> None:
        self.alerts.append(title)


def test_alerts_only_for_what_deserves_one(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    watch = WandbWatch()
    watch.observe({"rollspec/faults": 1})  # no run is active
    monkeypatch.setattr(wandb_run, "active_run", lambda: run)
    good = {"rollspec/accept/rate": 0.5, "rollspec/rollout/speedup": 1.3, "rollspec/faults": 0}
    watch.observe(good)
    assert run.alerts == []
    assert run.defined["rollspec/accept/rate"] == {"summary": "mean,last"}
    assert run.defined["train/rollspec/accept/rate/*"]["step_metric"] == "train/global_step"
    assert len(run.defined) == 2 * len(TABLE)
    watch.observe({**good, "rollspec/guard/alarms": 1})
    watch.observe({**good, "rollspec/faults": 2, "rollspec/faults/history": 2})
    watch.observe({**good, "rollspec/health/nan_logprobs": 3})
    assert [t.split(": ")[1] for t in run.alerts] == ["acceptance collapsed", "degraded", "NaN log-probs"]
    watch.observe({**good, "rollspec/drafter/promoted": 2, "rollspec/drafter/rolled_back": 0})
    assert len(run.alerts) == 3, "what stays is no alarm"
    watch.observe({**good, "rollspec/drafter/rolled_back": 1, "rollspec/drafter/refused": 1})
    assert [t.split(": ")[1] for t in run.alerts[3:]] == ["drafter version rolled back", "drafter version refused"]
    del run.alerts[3:]
    for _ in range(HARM_REPORTS - 1):
        watch.observe({**good, "rollspec/rollout/speedup": 0.8})
    assert len(run.alerts) == 3, "a bad report or two is noise"
    watch.observe({**good, "rollspec/rollout/speedup": 0.8})
    assert run.alerts[-1] == "rollspec: speculation costs time"


def test_a_broken_run_is_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    run.define_metric = lambda name, **options: 1 / 0  # type: ignore[method-assign,assignment]
    monkeypatch.setattr(wandb_run, "active_run", lambda: run)
    watch = WandbWatch()
    for _ in range(3):
        watch.observe({})
    assert len(caplog.records) == 1 and "no alerts" in caplog.text


def test_an_offline_run_has_the_alerts_in_its_file(tmp_path: Path) -> None:
    """A W&B run written by wandb itself, which the report does not read: it says how to export one."""
    pytest.importorskip("wandb")
    code = """
import sys, wandb
from rollspec.telemetry.wandb_run import WandbWatch
run = wandb.init(project="p", mode="offline", dir=sys.argv[1], settings=wandb.Settings(silent=True, console="off"))
WandbWatch().observe({"rollspec/faults": 1})
run.finish()
"""
    out = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert b"rollspec: degraded" in file.read_bytes()
    for folder in (tmp_path, file.parent):
        with pytest.raises(RollspecError, match=r"docs/monitoring.md says how to export"):
            load_run(folder)


def test_the_history_that_wandb_exports_is_read(tmp_path: Path) -> None:
    """Rows as `scan_history` gives them for a TRL job."""
    rows = [
        {"_step": i - 1, "_timestamp": 1.7e9, "train/global_step": i, "train/epoch": i / 2, "train/step_time": 4.0,
         "train/rollspec/rollout/generation_seconds": 1.5, "train/rollspec/accept/rate": 0.5, "train/reward": "NaN"}
        for i in range(1, 5)
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = load_run(tmp_path)
    assert run.steps == (1, 2, 3, 4) and run.epochs == [0, 0, 1, 1]
    assert run.series("timing_s/gen") == [1.5] * 4 and run.series("timing_s/step") == [4.0] * 4
    assert run.series("rollspec/accept/rate") == [0.5] * 4 and not run.has("critic/rewards/mean")


def test_a_trl_run_is_read_from_its_trainer_state(tmp_path: Path) -> None:
    rows = [
        {"step": i, "epoch": i / 2, "loss": 0.1, "reward": 0.5, "rollspec/rollout/generation_seconds": 1.5,
         "step_time": 4.0, "completions/mean_length": 80.0}
        for i in range(1, 5)
    ]  # fmt: skip
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": [*rows, {"step": 4, "train_runtime": 9}]}))
    run = load_run(tmp_path)
    assert run.steps == (1, 2, 3, 4) and run.epochs == [0, 0, 1, 1]
    assert run.series("timing_s/gen") == [1.5] * 4 and run.series("critic/rewards/mean") == [0.5] * 4
    (tmp_path / "trainer_state.json").write_text("{}")
    with pytest.raises(RollspecError, match=r"trainer_state.json cannot be read"):
        load_run(tmp_path)
