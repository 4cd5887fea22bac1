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


def test_saved_weights_are_not_the_live_ones() -> None:
    from rollspec_verl_cpu import patches

    module = types.ModuleType("fsdp_utils")
    live = torch.zeros(3)
    module.fsdp2_sharded_save_to_cpu = lambda model: ({"w": (live.detach().cpu(), "spec")}, "spec")  # type: ignore[attr-defined]
    patches._copied_weights(module)
    state, spec = module.fsdp2_sharded_save_to_cpu(None)
    live += 1
    assert state["w"][0].tolist() == [0, 0, 0] and state["w"][1] == spec == "spec"


def test_a_logger_takes_no_flush() -> None:
    import logging

    from rollspec_verl_cpu import patches

    module = types.ModuleType("trainer")
    module.logger = logging.getLogger("trainer of a test")  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        module.logger.warning("x", flush=True)  # as `info` does where it is not switched off
    patches._no_flush(module)
    module.logger.info("x", flush=True)


@pytest.mark.parametrize("receivers", [1, 2])
def test_the_gloo_engine_hands_over_weights_of_any_size_and_kind(receivers: int) -> None:
    """Threads stand in for processes; some weights are larger than a bucket, some do not end on a word."""
    pytest.importorskip("verl")
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    from rollspec_verl_cpu.gloo_engine import GlooCheckpointEngine

    generator = torch.Generator().manual_seed(0)
    weights = {
        "small": torch.randn(3, generator=generator),
        "odd": torch.randint(0, 255, (5,), dtype=torch.uint8, generator=generator),
        "half": torch.randn(4, 7, generator=generator).bfloat16(),
        "large": torch.randn(40, 9, generator=generator),
        "last": torch.randn(1, generator=generator),
    }
    actors = [GlooCheckpointEngine(256, is_master=i == 0) for i in range(2)]
    rollouts = [GlooCheckpointEngine(256) for _ in range(receivers)]

    async def receive(engine: Any) -> dict[str, Any]:
        return {name: tensor.clone() async for name, tensor in engine.receive_weights()}

    with ThreadPoolExecutor(2 + receivers) as pool:
        for _ in range(2):  # the group is made anew
            metadata = [e.prepare() for e in [*actors, *rollouts]]
            for_actors, for_rollouts = GlooCheckpointEngine.build_topology(2, receivers, metadata)
            rows = [
                {name: column[i] for name, column in given.items()}
                for given, n in ((for_actors, 2), (for_rollouts, receivers))
                for i in range(n)
            ]
            everyone = [*actors, *rollouts]
            list(pool.map(lambda pair: pair[0].init_process_group(**pair[1]), zip(everyone, rows, strict=True)))
            sent = [pool.submit(asyncio.run, a.send_weights(iter(weights.items()))) for a in actors]
            got = [pool.submit(asyncio.run, receive(r)) for r in rollouts]
            for future in got:
                found = future.result(60)
                assert found.keys() == weights.keys()
                assert all(torch.equal(found[k], v) and found[k].dtype == v.dtype for k, v in weights.items())
            assert [f.result(60) for f in sent] == [None, None]
            for e in everyone:
                e.finalize()


def test_trl_is_hidden_from_verl() -> None:
    """Every verl job fails beside TRL 1.16 otherwise: it takes a class from TRL that is not there any more."""
    from rollspec_verl_cpu import patches

    found = types.ModuleType("monkey_patch")
    found.is_trl_available = lambda: True  # type: ignore[attr-defined]
    patches._no_value_heads(found)
    assert found.is_trl_available() is False
