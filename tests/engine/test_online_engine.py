"""The whole loop in one engine: a fresh head, samples of what is generated, training while idle, swaps while not."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from engines import ALWAYS, build, call, close, generate
from heads import specforge_head

pytest.importorskip("speculators")
pytestmark = pytest.mark.engine


@pytest.mark.modes
@pytest.mark.slow  # a preset that trains (`test_a_preset_runs_as_it_is`) is its shorter sibling
def test_acceptance_rises_while_the_engine_idles(
    model: Path, prompts: list[list[int]], plain: dict[str, Any], tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "proposal.drafters": ["eagle3"],
        "proposal.head.k_max": 3,
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
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            assert generate(llm, prompts) == plain["greedy"]
            stats = call(llm, "stats")
            assert not stats["faults"], stats["faults"]
            rates.append(stats["accepted"] / stats["drafted"])
            levels = stats["drafter_levels"]
            info = call(llm, "info")["drafter"]
            if info["promoted"] and rates[-1] > 0.3:
                break
            time.sleep(3.0)  # the engine idles
        training = info["training"]
        assert rates[0] < 0.15 and rates[-1] > 0.3, json.dumps([rates, info])
        assert training["error"] is None and training["steps"] >= 60 and training["samples"] > 0
        assert training["used_seconds"] > 0.0
        assert levels["loss/accept_0"] > 0.0 and levels["micro_step_seconds"] > 0.0
        assert 0.0 <= levels["preempt_p99_seconds"] <= levels["preempt_seconds"]
        # While the policy is updated, nothing trains.
        call(llm, "updating", on=True)
        time.sleep(1.0)
        before = call(llm, "info")["drafter"]["training"]["steps"]
        time.sleep(1.5)
        assert call(llm, "info")["drafter"]["training"]["steps"] == before
    finally:
        close(llm)


@pytest.mark.slow  # `test_acceptance_rises_while_the_engine_idles` is its sibling; the layout has unit tests
def test_a_head_in_specforges_layout_is_trained_and_replaced(
    model: Path, prompts: list[list[int]], plain: dict[str, Any], tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "proposal.drafters": ["eagle3"],
        "proposal.head.model": str(specforge_head(tmp_path / "head", model)),
        "proposal.head.canary_drafts": 0,
        "proposal.head.k_max": 3,
        "drafter.mode": "idle",
        "drafter.dir": str(tmp_path),
        "drafter.publish_every": 30,
        "drafter.training": {"learning_rate": 3e-3, "batch_tokens": 512},
        "drafter.capture.share": 1.0,
        **ALWAYS,
    }
    llm = build(model, options)
    try:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            assert generate(llm, prompts) == plain["greedy"]
            stats = call(llm, "stats")
            assert not stats["faults"], stats["faults"]
            info = call(llm, "info")["drafter"]
            if info["promoted"] and stats["accepted"] > 0.3 * stats["drafted"]:
                break
            time.sleep(3.0)
        assert stats["accepted"] > 0.3 * stats["drafted"] and info["promoted"], json.dumps([stats, info])
        assert info["refused"] == 0 and info["training"]["error"] is None
        assert Path(info["started_with"]).parent == tmp_path / "heads"
    finally:
        close(llm)


@pytest.mark.slow  # `test_its_state_goes_into_the_jobs_checkpoint_and_comes_back` is its sibling without an engine
def test_a_checkpoint_has_the_state_of_a_trainer_in_its_own_process(
    model: Path, prompts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that begins in another folder goes on from it."""
    from rollspec.engine import daemon

    monkeypatch.setattr(daemon, "LINGER", 3.0)
    checkpoint = tmp_path / "global_step_1" / "rollspec" / "replica_0"
    options: dict[str, Any] = {
        "proposal.drafters": ["eagle3"],
        "drafter.mode": "dedicated",
        "drafter.publish_every": 20,
        "drafter.training": {"learning_rate": 3e-3, "batch_tokens": 512},
        "drafter.capture.share": 1.0,
        **ALWAYS,
    }

    def training(llm: Any) -> dict[str, Any]:
        found: dict[str, Any] = call(llm, "info")["drafter"]["training"]
        return found

    def until(condition: Any, seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, training(llm)
            time.sleep(0.2)

    llm = build(model, {**options, "drafter.dir": str(tmp_path / "first")})
    try:
        until(lambda: training(llm)["away"] is None)
        generate(llm, prompts)
        until(lambda: training(llm).get("loss") is not None)
        call(llm, "save", dir=str(checkpoint))
        assert list((checkpoint.parent / "drafter" / "state").glob("step-*")), training(llm)
        stats = call(llm, "stats")
        assert not stats["faults"] and stats["drafter_levels"]["loss/accept_0"] > 0.0
        held = len(json.loads((checkpoint.parent / "drafter" / "buffer" / "index.json").read_text())["samples"])
    finally:
        close(llm)
    llm = build(model, {**options, "drafter.dir": str(tmp_path / "second")})
    try:
        call(llm, "load", dir=str(checkpoint))
        until(lambda: training(llm).get("samples"))
        assert training(llm)["samples"] == held and training(llm)["loss"] is not None
        assert not call(llm, "stats")["faults"]
        assert "training resumes from" in (tmp_path / "second" / "daemon.log").read_text()
    finally:
        close(llm)
