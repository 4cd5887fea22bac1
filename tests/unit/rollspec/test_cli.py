"""The command line: light help, commands loaded on demand, one-sentence errors, the configuration commands."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from importlib.util import find_spec

import pytest
import typer
import yaml
from typer.testing import CliRunner

from rollspec import __version__, cli
from rollspec.config import RollspecConfig, knobs, presets
from rollspec.errors import RollspecError

runner = CliRunner()


def _install(monkeypatch: pytest.MonkeyPatch, name: str, command: object) -> None:
    """Put `command` in the place of a command's module."""
    module = types.ModuleType("stand_in")
    module.command = command  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "stand_in", module)
    monkeypatch.setitem(cli.COMMANDS, name, cli.Lazy("stand_in", "A stand-in."))


def test_help_lists_the_commands_and_imports_none_of_them() -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom rollspec import cli\n"
        "out = CliRunner().invoke(cli.app, ['--help'])\nassert out.exit_code == 0\n"
        "assert all(name in out.output for name in cli.COMMANDS), out.output\n"
        "mine = {c.module for c in cli.COMMANDS.values()} - {'rollspec.cli'}\n"
        "print(sorted(m for m in sys.modules if m in mine or m in ('numpy', 'pydantic', 'yaml')))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (out.returncode, out.stdout.strip()) == (0, "[]"), out.stderr


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_shows_its_own_help(name: str) -> None:
    if find_spec(cli.COMMANDS[name].module.rpartition(".")[0]) is None or find_spec(cli.COMMANDS[name].module) is None:
        pytest.skip(f"{cli.COMMANDS[name].module} is not there")
    out = runner.invoke(cli.app, [name, "--help"])
    assert out.exit_code == 0, out.output
    assert f"rollspec {name}" in " ".join(out.output.split()) or f"root {name}" in " ".join(out.output.split())


def test_version() -> None:
    assert runner.invoke(cli.app, ["--version"]).output.strip() == f"rollspec {__version__}"


def test_an_unknown_command_suggests_the_nearest() -> None:
    out = runner.invoke(cli.app, ["docter"])
    assert out.exit_code == cli.USAGE
    assert "'doctor'" in out.output


def test_a_function_becomes_a_command_with_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(run: str, top: int = 3) -> None:
        """Say what was asked."""
        typer.echo(f"{run} {top}")

    _install(monkeypatch, "bench", command)
    assert runner.invoke(cli.app, ["bench", "all", "--top", "5"]).output.strip() == "all 5"
    assert "Say what was asked." in runner.invoke(cli.app, ["bench", "--help"]).output


def test_an_error_of_rollspec_is_its_sentence_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def command() -> None:
        raise RollspecError("rollspec: the file 'x' is no run; give a run folder.")

    _install(monkeypatch, "report", command)
    out = runner.invoke(cli.app, ["report"])
    assert out.exit_code == cli.USAGE
    assert out.stderr.strip() == "rollspec: the file 'x' is no run; give a run folder."
    assert out.stdout == ""


def test_an_unexpected_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def command() -> None:
        raise ZeroDivisionError

    _install(monkeypatch, "report", command)
    assert isinstance(runner.invoke(cli.app, ["report"]).exception, ZeroDivisionError)


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        ("jinja2", "`rollspec report` needs jinja2, which is not installed; run pip install 'rollspec[report]'."),
        ("rollspec.telemetry.report", "is not in this installation"),
    ],
)
def test_a_missing_dependency_names_the_extra(monkeypatch: pytest.MonkeyPatch, missing: str, says: str) -> None:
    def refuse(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(cli.importlib, "import_module", refuse)
    out = runner.invoke(cli.app, ["report", "--help"])
    assert out.exit_code == cli.USAGE
    assert says in out.stderr


def test_config_lists_every_knob() -> None:
    listed = json.loads(runner.invoke(cli.app, ["config", "--json"]).output)
    assert [k["name"] for k in listed] == [name for name, *_ in knobs(RollspecConfig)]
    assert all(set(k) == {"name", "type", "default", "description"} for k in listed)
    table = runner.invoke(cli.app, ["config"]).output
    assert all(name in table for name, *_ in knobs(RollspecConfig))
    assert "fixed | goodput" in " ".join(table.replace("│", " ").split())


def test_config_runs_as_a_module_too() -> None:
    command = [sys.executable, "-m", "rollspec.cli", "config", "presets", "--json"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert out.returncode == 0 and [p["name"] for p in json.loads(out.stdout)] == list(presets()), out.stderr


def test_config_show_prints_what_load_resolves() -> None:
    out = runner.invoke(
        cli.app, ["config", "show", "suffix_only", "--set", "proposal.k_max=9", "--set", "enabled=false"]
    )
    want = RollspecConfig.load("suffix_only", overrides=["proposal.k_max=9", "enabled=false"])
    assert RollspecConfig.load(yaml.safe_load(out.output)) == want
    as_json = runner.invoke(cli.app, ["config", "show", "--json"])
    assert json.loads(as_json.output) == RollspecConfig.load().to_dict()


def test_config_show_refuses_in_one_sentence() -> None:
    out = runner.invoke(cli.app, ["config", "show", "default", "--set", "proposal.k_maks=9"])
    assert out.exit_code == cli.USAGE
    assert "did you mean 'proposal.k_max'?" in out.stderr
    assert len(out.stderr.strip().splitlines()) == 1


def test_config_presets() -> None:
    listed = json.loads(runner.invoke(cli.app, ["config", "presets", "--json"]).output)
    assert [p["name"] for p in listed] == list(presets())
    assert all(p["summary"].endswith(".") for p in listed)
    assert "suffix_only" in runner.invoke(cli.app, ["config", "presets"]).output
