"""The whole loop in one engine: a fresh head, samples of what is generated, training while idle, swaps while not."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from engines import build, call, close, generate

pytest.importorskip("speculators")
pytestmark = pytest.mark.engine

ALWAYS = {"tuning.policy": "static", "proposal.budget.policy": "fixed", "tuning.guard.enabled": False}


def test_acceptance_rises_while_the_engine_idles(
    model: Path, prompts: list[list[int]], plain: dict[str, Any], tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "proposal.drafters": ["eagle3"],
        "proposal.learned.k_max": 3,
        "proposal.learned.folder": str(tmp_path / "heads"),
        "drafter.mode": "idle",
        "drafter.dir": str(tmp_path),
        "drafter.publish_every": 60,
        "drafter.training": {"learning_rate": 3e-3, "batch_tokens": 512},
        "drafter.capture.share": 1.0,
        **ALWAYS,
    }
    llm = build(model, options)
    try:
        assert list((tmp_path / "heads").iterdir()), "no fresh head was made"
        rates = []
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            assert generate(llm, prompts) == plain["greedy"]
            stats = call(llm, "stats")
            assert not stats["faults"], stats["faults"]
            rates.append(stats["accepted"] / stats["drafted"])
            info = call(llm, "info")["drafter"]
            if info["promoted"] and rates[-1] > 0.3:
                break
            time.sleep(3.0)  # the engine idles
        training = info["training"]
        assert rates[0] < 0.15 and rates[-1] > 0.3, json.dumps([rates, info])
        assert training["error"] is None and training["steps"] >= 60 and training["samples"] > 0
        assert training["harvested_seconds"] > 0.0
        # While the policy is updated, nothing trains.
        call(llm, "updating", on=True)
        time.sleep(1.0)
        before = call(llm, "info")["drafter"]["training"]["steps"]
        time.sleep(1.5)
        assert call(llm, "info")["drafter"]["training"]["steps"] == before
    finally:
        close(llm)
