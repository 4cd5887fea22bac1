"""Carrying a wheel in parts: what is stripped, cut, checked, joined, and tried."""

from __future__ import annotations

import importlib.util
import json
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
FILES: dict[str, bytes] = {
    "vllm/__init__.py": b"import vllm.inner\n",
    "vllm/inner.py": b"import carried\n",
    "vllm/_C_stable_libtorch.abi3.so": random.Random(0).randbytes(300_000),
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": random.Random(1).randbytes(200_000),
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": bytes(1_500_000),
    "vllm/_moe_C_stable_libtorch.abi3.so": bytes(1_200_000),
    "vllm/cumem_allocator.abi3.so": b"small",
    "vllm/vllm-rs": bytes(1000),
    "vllm/third_party/cutlass.hpp": b"//",
    "vllm-0.33.0.dist-info/METADATA": b"Name: vllm\nVersion: 0.33.0\n",
    "vllm-0.33.0.dist-info/RECORD": b"",
}


def _script() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_carry", ROOT / "scripts" / "gpu_carry.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


carry = _script()


def wheel(path: Path, files: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    wheel(tmp_path / "wheels" / "carried-1-py3-none-any.whl", {"carried.py": b"VALUE = 7\n"})
    source = wheel(tmp_path / "vllm-0.33.0-cp38-abi3-linux.whl", FILES)
    carry.split(source, tmp_path / "parts", tmp_path / "wheels", part_bytes=150_000)
    return tmp_path / "parts"


def test_round_trip(packed: Path, tmp_path: Path) -> None:
    manifest = json.loads((packed / "manifest.json").read_text())
    sizes = [p["bytes"] for p in manifest["parts"]]
    assert len(sizes) >= 4 and max(sizes) <= 150_000 and sum(sizes) == manifest["bytes"]
    carry.join(packed, tmp_path / "site")
    found = {p.relative_to(tmp_path / "site").as_posix(): p.read_bytes() for p in (tmp_path / "site").rglob("*.*")
             if p.is_file()}  # fmt: skip
    kept = {n: d for n, d in FILES.items() if carry.kept(n, len(d))}
    assert found == {n: d for n, d in kept.items() if "." in Path(n).name} | {"carried.py": b"VALUE = 7\n"}
    assert (tmp_path / "site/vllm-0.33.0.dist-info/METADATA").is_file()


def test_what_is_stripped(packed: Path) -> None:
    left = set(json.loads((packed / "manifest.json").read_text())["left_out"])
    assert left == {
        "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", "vllm/_moe_C_stable_libtorch.abi3.so", "vllm/vllm-rs",
        "vllm/third_party/cutlass.hpp", "vllm-0.33.0.dist-info/RECORD",
    }  # fmt: skip


def test_a_part_that_is_missing_or_damaged_is_named(packed: Path, tmp_path: Path) -> None:
    part = packed / "part-001"
    data = part.read_bytes()
    part.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(carry.CarryError, match="part-001 differs"):
        carry.join(packed, tmp_path / "site")
    part.unlink()
    with pytest.raises(carry.CarryError, match="lacks part-001"):
        carry.join(packed, tmp_path / "site")
    assert not (tmp_path / "site").exists()


def test_a_folder_in_use_is_refused(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "mine.py").write_text("")
    with pytest.raises(carry.CarryError, match="not empty"):
        carry.join(packed, tmp_path / "site")


def test_the_command_line(packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert carry.main([str(packed), str(tmp_path / "site"), "--join"]) == 0
    assert "1 more wheels" in capsys.readouterr().out
    assert carry.main([str(tmp_path / "no.whl"), str(tmp_path / "other")]) == 1
    assert "no.whl cannot be packed" in capsys.readouterr().err


def test_a_rehearsal_names_what_the_machine_lacks(tmp_path: Path) -> None:
    """rich is installed here and not on the machine; yaml is on both."""
    (tmp_path / "machine.txt").write_text("PyYAML\n")
    files = {
        "vllm/__init__.py": b"",
        "vllm/a.py": b"import yaml, carried\n",
        "vllm/b.py": b"import rich\n",
        "vllm/c.py": b"try:\n    import rich\nexcept ImportError:\n    rich = None\n",
        "vllm/d.py": b"from importlib.util import find_spec\nassert find_spec('rich') is None\n"
        b"from importlib.metadata import version\nversion('pyyaml')\n",
    }
    wheel(tmp_path / "wheels" / "carried-1-py3-none-any.whl", {"carried.py": b""})
    carry.split(wheel(tmp_path / "vllm-1.whl", files), tmp_path / "parts", tmp_path / "wheels")
    found = carry.rehearse(tmp_path / "parts", tmp_path / "machine.txt", ("vllm.a", "vllm.b", "vllm.c", "vllm.d"))
    imports = found["imports"]
    assert imports["vllm.a"] is None and imports["vllm.c"] is None and imports["vllm.d"] is None, imports
    assert "rich" in imports["vllm.b"] and found["refused"] == ["rich"]
