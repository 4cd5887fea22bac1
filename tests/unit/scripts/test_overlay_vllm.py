"""A release's Python files over the compiled parts of the installed CPU build."""

from __future__ import annotations

import zipfile
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts.overlay_vllm import main, overlay

INFO = "vllm-9.1.0.dist-info/METADATA"


def wheel(folder: Path, info: str = INFO) -> Path:
    path = folder / "vllm-9.1.0-cp38-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(path, "w") as z:
        z.writestr("vllm/__init__.py", "new = True")
        z.writestr("vllm/_C.abi3.so", "of a GPU")
        z.writestr(info, "Metadata-Version: 2.4\nName: vllm\nVersion: 9.1.0\nRequires-Dist: torch\n")
        z.writestr(info.replace("METADATA", "RECORD"), "")
    return path


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    there = tmp_path / "site" / "vllm"
    (there / "sub").mkdir(parents=True)
    for name in ("_C.abi3.so", "sub/more.abi3.so", "__init__.py"):
        (there / name).write_text("of the CPU build")
    found = SimpleNamespace(locate_file=lambda name: tmp_path / "site" / name)
    monkeypatch.setattr(metadata, "distribution", lambda name: found)
    return there


def test_python_is_the_releases_and_compiled_parts_are_the_installed_ones(tmp_path: Path, installed: Path) -> None:
    out = tmp_path / "out"
    assert overlay(wheel(tmp_path), out) == "9.1.0+cpu"
    assert (out / "vllm/__init__.py").read_text() == "new = True"
    assert (out / "vllm/_C.abi3.so").read_text() == (out / "vllm/sub/more.abi3.so").read_text() == "of the CPU build"
    (info,) = out.glob("*.dist-info")
    assert info.name == "vllm-9.1.0+cpu.dist-info" and "\nVersion: 9.1.0+cpu\n" in (info / "METADATA").read_text()
    assert not (info / "RECORD").exists()


def test_what_cannot_be_used_is_said(
    tmp_path: Path, installed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = wheel(tmp_path, "other-9.1.0.dist-info/METADATA")
    assert main([str(other), str(tmp_path / "a")]) == 1 and "is no wheel of vLLM" in capsys.readouterr().err
    good = wheel(tmp_path)
    assert main([str(good), str(installed)]) == 1 and "is not empty" in capsys.readouterr().err

    def absent(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)
    assert main([str(good), str(tmp_path / "b")]) == 1 and "make setup" in capsys.readouterr().err
