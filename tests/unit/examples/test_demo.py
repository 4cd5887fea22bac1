"""The demonstration without verl: the command that it builds, and what it shows."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
from demo_job import STEPS, job
from report_samples import rows, write_demo
from rich.console import Console
from typer.testing import CliRunner

from examples.demo import cli, warm
from examples.demo.budget import Budget
from examples.demo.job import (
    BUCKET,
    Assets,
    JobSettings,
    bucket_megabytes,
    build_job,
    hydra_value,
    prepare_assets,
    wandb_environment,
)
from examples.demo.live import Display, RunView
from examples.demo.runner import JobFailed
from rollspec.cli import app
from rollspec.config import RollspecConfig
from rollspec.errors import RollspecError

# ------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def assets(tmp_path: Path) -> Assets:
    (tmp_path / "manifest.json").write_text("{}")
    names = {name: f"/data/{name}" for name in ("model", "train", "val", "reward")}
    return Assets(**names, manifest=str(tmp_path / "manifest.json"))


@pytest.fixture(autouse=True)
def warmed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No engine is started; the models of those that would be."""
    models: list[str] = []
    monkeypatch.setattr(cli, "warm_up", lambda model, *_: models.append(model) or "")
    return models


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for the trainer's CPU part."""
    module = types.ModuleType("rollspec_verl_cpu")
    module.environment = lambda replicas=1: {"VERL_PLATFORM": "cpu"}  # type: ignore[attr-defined]
    module.overrides = lambda replicas=1: ["trainer.device=cpu"]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rollspec_verl_cpu", module)


@pytest.mark.usefixtures("cpu")
def test_runs_differ_in_rollspec_alone(assets: Assets, tmp_path: Path) -> None:
    environ = {"RAY_ADDRESS": "x", "ROLLSPEC__PROPOSAL__K_MAX": "3", "HOME": str(tmp_path)}
    a, b = (
        build_job(JobSettings(), assets, tmp_path / "runs" / "d" / name, speculate=on, environ=environ)
        for name, on in (("baseline", False), ("rollspec", True))
    )
    differing = {x.split("=")[0] for x, y in zip(a.command, b.command, strict=True) if x != y}
    assert differing == {
        "trainer.experiment_name",
        "trainer.default_local_dir",
        "+actor_rollout_ref.rollout.custom.rollspec",
    }
    assert {k for k in a.environment if a.environment[k] != b.environment[k]} == {
        "VERL_FILE_LOGGER_PATH",
        "ROLLSPEC_VERL_LENGTHS",
        "WANDB_DIR",
    }
    assert a.removed == ("RAY_ADDRESS", "ROLLSPEC__PROPOSAL__K_MAX")
    assert a.settings == b.settings and a.settings_hash != b.settings_hash
    assert a.command[-1].endswith("={enabled:false}")


@pytest.mark.usefixtures("cpu")
def test_settings_hash(assets: Assets, tmp_path: Path) -> None:
    def digest(folder: str = "a", seed: int = 0, **kwargs: object) -> str:
        settings = replace(JobSettings(), seed=seed)
        return build_job(settings, assets, tmp_path / folder, speculate=True, **kwargs).settings_hash  # type: ignore[arg-type]

    assert digest() == digest("b")
    assert len({digest(), digest(seed=1), digest(overrides=["proposal.k_max=8"]), digest(preset="default")}) == 3


@pytest.mark.usefixtures("cpu")
def test_overrides_are_hydra_and_load_again(assets: Assets, tmp_path: Path) -> None:
    parser = pytest.importorskip("hydra.core.override_parser.overrides_parser").OverridesParser.create()
    made = build_job(JobSettings(), assets, tmp_path / "it's", speculate=True, overrides=["proposal.k_max=5"])
    parsed = {o.key_or_group: o.value() for o in parser.parse_overrides(list(made.command[3:]))}
    assert len(parsed) == len(made.command) - 3, "an option is given twice"
    config = RollspecConfig.load(parsed["actor_rollout_ref.rollout.custom.rollspec"], env={})
    assert config == RollspecConfig.load("default", overrides=["proposal.k_max=5"], env={})


def test_settings_bound_the_steps() -> None:
    assert JobSettings().total_steps == 32
    assert JobSettings(steps=4).total_steps == 4 and JobSettings(steps=99).total_steps == 32
    with pytest.raises(RollspecError, match="number from 1 up"):
        JobSettings(steps=0)


def test_a_slow_cpu_gets_fewer_prompts_unless_a_number_is_given() -> None:
    assert cli.settings_for("bfloat16", None).total_steps == 32
    assert cli.settings_for("float32", None).total_steps == 12
    with pytest.raises(RollspecError, match="--prompts 30 does not fill"):
        cli.settings_for("float32", 30)
    whole = cli.settings_for("float32", 32, seed=1)
    assert (whole.total_steps, whole.dtype, whole.seed) == (32, "float32", 1)


def test_a_model_of_ones_own_gets_tasks_and_a_smaller_job(
    assets: Assets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "model_folder", lambda name: tmp_path / name)
    header = json.dumps({"__metadata__": {}, "embed": {"shape": [49152, 576]}, "norm": {"shape": [576]}}).encode()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    real = cli.settings_for("float32", None, "mine", epochs=2)
    assert real.model == str(tmp_path / "mine") and real.example == "grpo_tasks"
    assert real.total_steps == 6 and real.prompts_per_step * real.n == 16
    command = build_job(real, assets, tmp_path / "r", speculate=True).command
    for option in (
        "data.max_response_length=512",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.max_model_len=768",
        "reward.custom_reward_function.path='/data/reward'",
        f"{BUCKET}=217",  # the embedding is 108 MB in float32, and there twice
    ):
        assert option in command
    assert bucket_megabytes(tmp_path) == 64
    assert cli.settings_for("bfloat16", None).example == "grpo_arithmetic"
    assert "model" not in build_job(JobSettings(), assets, tmp_path / "r", speculate=True).settings
    with pytest.raises(RollspecError, match="--prompts 6 does not fill steps of 4"):
        cli.settings_for("float32", 6, "mine")
    with pytest.raises(RollspecError, match="--size tiny"):
        cli.settings_for("float32", None, "mine", size="tiny")


def test_assets_are_those_of_the_example_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def run(command: list[str], **_: object) -> types.SimpleNamespace:
        seen.append(command)
        return types.SimpleNamespace(stdout=json.dumps({n: n for n in ("model", "train", "val", "reward", "manifest")}))

    monkeypatch.setattr("examples.demo.job.subprocess.run", run)
    prepare_assets(JobSettings(), tmp_path)
    prepare_assets(JobSettings(model="/m"), tmp_path)
    assert "examples.grpo_arithmetic.prepare" in seen[0] and "--size" in seen[0] and "--model" not in seen[0]
    assert "examples.grpo_tasks.prepare" in seen[1] and seen[1][seen[1].index("--model") + 1] == "/m"
    assert "--size" not in seen[1]


def test_hydra_value() -> None:
    value = {"a": None, "b": [True, 1.5, "it's"], "c": {}, "d": "x,y:{z}"}
    assert hydra_value(value) == r"{a:null,b:[true,1.5,'it\'s'],c:{},d:'x,y:{z}'}"


def test_wandb_stays_offline_unless_logged_in(tmp_path: Path) -> None:
    def mode(**environ: str) -> str | None:
        return wandb_environment({"HOME": str(tmp_path), **environ}, tmp_path).get("WANDB_MODE")

    assert mode() == "offline" and mode(WANDB_API_KEY="k") == "online"
    assert mode(WANDB_MODE="disabled") is None  # the caller's own choice is inherited
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password secret\n")
    assert mode() == "online"


# ------------------------------------------------------------------------------------------------------- what is shown


def test_plain_lines_without_a_terminal() -> None:
    console = Console(file=__import__("io").StringIO(), width=200)
    display = Display(console)
    with display.watching(RunView("rollspec", 18, 300.0)):
        for row in rows(True)[:3]:
            display.tick()
            display.step({k: v for k, v in row.items() if isinstance(v, int | float)})
        display.step({})
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0] == "rollspec: 18 training steps"
    assert "step 3/18, generation s " in lines[3] and "acceptance length" in lines[3] and "left" in lines[3]


def test_panel_on_a_terminal() -> None:
    console = Console(file=__import__("io").StringIO(), width=100, force_terminal=True)
    display = Display(console)
    with display.watching(RunView("baseline", 2)):
        display.tick()
        display.step({"training/global_step": 1.0, "timing_s/gen": 2.5, "timing_s/step": 4.0})
        display.tick()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "starting Ray" in text and "generation s" in text


def test_conclusion_and_latest_link(tmp_path: Path) -> None:
    out = write_demo(tmp_path / "runs" / "demo-1")
    console = Console(file=__import__("io").StringIO(), width=160)
    numbers = cli.conclude(out, console, html=True)
    assert "faster from the second epoch on" in numbers["headline"]
    assert numbers["headline"] in console.file.getvalue()  # type: ignore[attr-defined]
    assert (out / "report.html").is_file() and (out / "report.json").is_file()
    cli.link_latest(out)
    cli.link_latest(out)
    assert (tmp_path / "runs" / "latest").resolve() == out
    cli.link_latest(write_demo(tmp_path / "elsewhere"))
    assert not (tmp_path / "latest").exists()


def test_finished_baseline_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, assets: Assets) -> None:
    out = tmp_path / "runs" / "d"
    monkeypatch.setattr(cli, "prepare_assets", lambda *a: assets)
    monkeypatch.setattr(cli, "build_job", lambda s, a, folder, *, speculate, **k: job(folder, STEPS.format(n=3)))
    console = Console(file=__import__("io").StringIO(), width=200)
    plan = cli.Plan(JobSettings(), out, ("baseline", "rollspec"), "default", ())
    cli.run_plan(plan, Display(console))
    first = json.loads((out / "baseline" / "run.json").read_text())["started"], (out / "rollspec").stat().st_mtime_ns
    cli.run_plan(plan, Display(console))
    second = json.loads((out / "baseline" / "run.json").read_text())["started"], (out / "rollspec").stat().st_mtime_ns
    assert second[0] == first[0] and second[1] > first[1]
    assert console.file.getvalue().count("already finished with these settings") == 1  # type: ignore[attr-defined]


def test_a_slow_machine_gets_whole_epochs_that_fit_and_ends_in_time() -> None:
    def run(budget: Budget, launch: float, pace: float, most: int = 12) -> int:
        budget.start()
        for done in range(1, most + 1):
            now[0] += launch if done == 1 else pace
            budget.step()
            if budget.enough():
                return done
        return most

    now = [50.0]
    for launch, pace, steps in ((100.0, 8.0, 12), (150.0, 30.0, 9), (150.0, 45.0, 6), (200.0, 400.0, 5)):
        budget = Budget(900.0, 2, 3, clock=lambda: now[0])
        now[0] += 30.0  # preparing
        budget.steps = run(budget, launch, pace)
        assert budget.steps == steps
        assert run(budget, launch, pace) == steps  # the second run has as many
    assert run(Budget(float("inf"), 2, 3, clock=lambda: now[0]), 1000.0, 1000.0) == 12
    budget = Budget(900.0, 2, 3, clock=lambda: now[0])
    began = now[0]
    budget.steps = run(budget, 150.0, 30.0)
    assert budget.steps == 9 and run(budget, 150.0, 60.0) == 6, "a slower second run ends when the time is over"
    assert now[0] - began < 900.0


def test_both_runs_are_warmed_up_and_end_with_the_same_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, assets: Assets, warmed: list[str]
) -> None:
    script = STEPS.format(n=12).replace("flush=True)", "flush=True); time.sleep(0.3)")
    monkeypatch.setattr(cli, "prepare_assets", lambda *a: assets)
    monkeypatch.setattr(cli, "build_job", lambda s, a, folder, *, speculate, **k: job(folder, script, steps=12))
    console = Console(file=__import__("io").StringIO(), width=200)
    out = tmp_path / "runs" / "d"
    cli.run_plan(cli.Plan(JobSettings(train_prompts=12), out, cli.RUNS, "default", (), minutes=0.01), Display(console))
    assert warmed == [assets.model]
    states = [json.loads((out / name / "run.json").read_text())["status"] for name in cli.RUNS]
    assert states == ["finished", "finished"]
    assert 5 <= cli.steps_done(out / "baseline") < 12
    assert abs(cli.steps_done(out / "baseline") - cli.steps_done(out / "rollspec")) <= 1
    assert "whole epochs as both runs can have in 0.01 minutes" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_warm_up_is_bounded_and_says_what_went_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(warm, "SECONDS", 0.2)
    assert warm.warm_up(str(tmp_path), "float32", {}) == "it took more than 0.2 s"
    monkeypatch.setattr(warm, "SECONDS", 120.0)
    monkeypatch.setattr(warm, "ROOT", tmp_path)  # no model there
    assert "it exited with status 1" in warm.warm_up(str(tmp_path), "float32", {"PYTHONPATH": ""})


def test_the_null_control_is_beside_the_ratio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = cli.null_control()
    assert line is not None and line.startswith("null control, nothing drafted: ") and " at batch 4" in line
    console = Console(file=__import__("io").StringIO(), width=300)
    out = write_demo(tmp_path / "runs" / "demo-1")
    numbers = cli.conclude(out, console, html=True)
    assert line in console.file.getvalue() and numbers["null_control"] == line  # type: ignore[attr-defined]
    assert line[1:] in (out / "report.html").read_text()
    monkeypatch.setattr(cli, "CONTROL", tmp_path / "absent.json")
    assert cli.null_control() is None


def test_command_refuses_bad_input_before_running(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cli, "require_programs", lambda: None)
    monkeypatch.setattr(cli, "run_plan", lambda *a: pytest.fail("must not start"))
    for args, text in (
        (["--set", "proposal.kmax=8"], "proposal.k_max"),
        (["--preset", "nope"], "no preset"),
        (["--steps", "0"], "number from 1 up"),
        (["--model", str(tmp_path / "absent")], "is no folder"),
    ):
        result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path), *args])
        assert result.exit_code == 2 and text in result.output


@pytest.mark.parametrize(("name", "folder"), [("demo", "examples"), ("bench", "benchmarks")])
def test_commands_of_the_repository_outside_of_it(monkeypatch: pytest.MonkeyPatch, name: str, folder: str) -> None:
    for module in [m for m in sys.modules if m.partition(".")[0] == folder]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, folder, None)
    result = CliRunner().invoke(app, [name])
    assert result.exit_code == 2 and "clone the repository" in result.output.replace("\n", " ")


def test_command_reports_a_failed_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise JobFailed("rollspec: the baseline job exited with status 1.", "last [line] of the log")

    monkeypatch.setattr(cli, "require_programs", lambda: None)
    monkeypatch.setattr(cli, "run_plan", fail)
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path)])
    assert result.exit_code == 1 and "last [line] of the log" in result.output and "status 1" in result.output


@pytest.mark.parametrize(("steps", "how"), [(2, "failed"), (0, None)])
def test_a_run_that_was_cut_off_is_reported_as_far_as_it_came(
    steps: int, how: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, assets: Assets
) -> None:
    ends = {"baseline": STEPS.format(n=3), "rollspec": STEPS.format(n=steps) + "raise RuntimeError('out of memory')"}
    monkeypatch.setattr(cli, "require_programs", lambda: None)
    monkeypatch.setattr(cli, "prepare_assets", lambda *a: assets)
    monkeypatch.setattr(cli, "build_job", lambda s, a, folder, *, speculate, **k: job(folder, ends[folder.name]))
    out = tmp_path / "runs" / "d"
    result = CliRunner().invoke(app, ["demo", "--out", str(out)])
    assert result.exit_code == 1 and "out of memory" in result.output and "in all: " in result.output
    numbers = json.loads((out / "report.json").read_text())
    assert (out / "report.html").is_file() and (numbers["comparison"] is not None) == bool(steps)
    if how:
        assert f"rollspec did not finish ({how}): the numbers are of its 2 steps" in result.output
        assert numbers["comparison"]["steps"] == 2
