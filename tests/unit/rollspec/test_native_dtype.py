"""The job's number format follows the CPU: emulated bfloat16 would take the whole day."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollspec.machine import native_dtype


@pytest.mark.parametrize(
    ("line", "dtype"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_bf16 sha_ni", "bfloat16"),
        ("flags\t\t: fpu avx2 amx_bf16", "bfloat16"),
        ("Features\t: fp asimd bf16", "bfloat16"),
        ("flags\t\t: fpu avx avx2 avx512f", "float32"),
        ("model name\t: a CPU with bf16 in its name", "float32"),
    ],
)
def test_the_cpus_own_format(tmp_path: Path, line: str, dtype: str) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor\t: 0\n{line}\nbugs\t: none\n")
    assert native_dtype(path) == dtype


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    assert native_dtype(tmp_path / "none") == "float32"
