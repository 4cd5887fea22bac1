"""The CPU platform: silent unless asked for, refuses beside CUDA, and its settings are well-formed."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from typing import Any

import pytest

torch = pytest.importorskip("torch")


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VERL_")}
    return subprocess.run(
        [sys.executable, "-c", code], env={**environment, **env}, capture_output=True, text=True, timeout=120
    )


def test_it_changes_nothing_unless_asked_for() -> None:
    done = run("import sys, rollspec_verl_cpu; print(sorted({'torch', 'verl', 'rollspec_verl'} & set(sys.modules)))")
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("where", ["device", "torch"])
def test_it_refuses_beside_cuda(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import rollspec_verl_cpu as cpu

    if where == "device":
        monkeypatch.setattr(cpu, "accelerator", lambda: "an NVIDIA device is present (/dev/nvidia*)")
    else:
        monkeypatch.setattr(cpu, "accelerator", lambda: None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match=r"asks for verl on CPU, but .*; unset VERL_PLATFORM"):
        cpu.register()


def test_an_nvidia_device_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    import rollspec_verl_cpu as cpu

    class Device(type(cpu.Path())):  # type: ignore[misc]
        def exists(self, **_: Any) -> bool:
            return str(self) == "/dev/nvidia0"

    monkeypatch.setattr(cpu, "Path", Device)
    assert "NVIDIA" in (cpu.accelerator() or "")


def test_verl_loads_the_platform_through_its_entry_point() -> None:
    pytest.importorskip("verl")
    if torch.cuda.is_available():
        pytest.skip("refused beside CUDA")
    code = (
        "import verl; from verl.utils.device import get_device_name, get_nccl_backend;"
        "import sys; print(get_device_name(), get_nccl_backend(), 'rollspec_verl' in sys.modules)"
    )
    done = run(code, VERL_PLATFORM="cpu")
    assert done.stdout.split()[-3:] == ["cpu", "gloo", "False"], done.stderr[-2000:]


def test_settings_are_hydra_overrides_and_strings() -> None:
    import rollspec_verl_cpu as cpu

    settings = [*cpu.overrides(), *cpu.critic_overrides()]
    assert all("=" in s for s in settings)
    names = [s.split("=")[0].lstrip("+") for s in settings]
    assert len(names) == len(set(names))
    environment = cpu.environment(threads=3)
    assert environment["OMP_NUM_THREADS"] == "3" and environment["ROLLSPEC_PATCHES"] == "cpu"
    assert all(isinstance(v, str) for v in environment.values())


def test_trl_is_hidden_from_verl() -> None:
    """Every verl job fails beside TRL 1.16 otherwise: it takes a class from TRL that is not there any more."""
    from rollspec_verl_cpu import patches

    found = types.ModuleType("monkey_patch")
    found.is_trl_available = lambda: True  # type: ignore[attr-defined]
    patches._no_value_heads(found)
    assert found.is_trl_available() is False
