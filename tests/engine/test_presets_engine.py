"""Presets of published systems in a real engine: they build, draft what they are named for, and change no token."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from engines import build, call, close, generate
from heads import random_head

pytest.importorskip("speculators")
pytestmark = pytest.mark.engine


@pytest.mark.parametrize("name", ["aurora", "osd", "respec", "tlt", "day0", "seer"])
def test_a_preset_runs_as_it_is(
    name: str, model: Path, prompts: list[list[int]], plain: dict[str, Any], tmp_path: Path
) -> None:
    learned = name != "seer"
    options: dict[str, Any] = {"preset": name}
    if learned:
        options |= {"proposal.learned.model": str(random_head(tmp_path / "head", model)), "drafter.dir": str(tmp_path)}
    llm = build(model, options)
    try:
        assert generate(llm, prompts) == plain["greedy"]
        end = time.monotonic() + 60
        while learned and not _trained(llm) and time.monotonic() < end:
            time.sleep(0.5)  # the engine idles
        assert generate(llm, prompts) == plain["greedy"]
        stats, info = call(llm, "stats"), call(llm, "info")
        assert not stats["faults"], stats["faults"]
        assert info["preset"] == name and info["state"] not in ("none", "off"), info
        if name in ("aurora", "osd"):
            assert set(stats["plays"]) == {"eagle3:5"} and stats["drafted"] > 0
        if name == "respec":
            assert set(stats["plays"]) <= {"eagle3:4", "eagle3:2", "none"} and stats["drafted"] > 0
        if learned:
            training = info["drafter"]["training"]
            assert training["error"] is None and info["drafter"]["capture"]["samples"] > 0, info["drafter"]
            assert _trained(llm), training
    finally:
        close(llm)


def _trained(llm: Any) -> bool:
    return bool(call(llm, "info")["drafter"]["training"].get("steps", 0))
