"""OpenRLHF's real vLLM actors under Ray on CPU; skipped where OpenRLHF is not there.

pip install --no-deps --target DIR openrlhf==0.11.2
PYTHONPATH=DIR pytest tests/e2e/test_openrlhf.py
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openrlhf")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]


@pytest.mark.supports(
    "OpenRLHF", "its vLLM actors; an actor stands in for its trainer", "drafts", "policy versions", "metrics"
)
def test_its_actors_speculate_and_are_measured(run_bounded: Callable[..., Any], tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen3ForCausalLM

    from examples.grpo_arithmetic.prepare import prepare

    model = prepare(tmp_path / "policy", size="tiny").model
    policy = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(7)
    changed = {n: p + torch.randn_like(p) * p.std().clamp_min(0.02) for n, p in policy.named_parameters()}
    save_file({n: p.detach().contiguous() for n, p in changed.items()}, tmp_path / "new.safetensors")

    scratch = tempfile.mkdtemp(prefix="rs-")  # short: Ray puts unix sockets in it
    script, out = Path(__file__).with_name("openrlhf_job.py"), tmp_path / "out.json"
    environment = {"RAY_TMPDIR": scratch, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    try:
        done = run_bounded(
            [sys.executable, script, model, tmp_path / "new.safetensors", out], 500, cwd=ROOT, env=environment
        )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    assert done.returncode == 0, done.stdout[-5000:]
    result = json.loads(out.read_text())
    assert result["info"]["state"] == "suffix"
    assert result["extended"] == "extended", "OpenRLHF's worker extension is there beside rollspec's method"
    first, second, third = result["steps"]
    assert first["tokens"] != third["tokens"], "the new weights were loaded"
    assert second["rollspec/accept/accepted"] > 0
    assert second["rollspec/accept/length"] > first["rollspec/accept/length"], "the second step drafts from the first"
    assert [s["rollspec/policy/version"] for s in result["steps"]] == [0, 0, 1], "loading weights is a new version"
    assert all(s["rollspec/faults"] == 0 for s in result["steps"])
