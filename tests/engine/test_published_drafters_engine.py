"""Presets of published drafters in a real engine: every draft is the one that the paper's rule gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import build, call, close, generate
from noted import noise_of_stand, note_drafter, noted
from published import Consensus, Hierarchy, Rule, Stand, TokenRecycling, check

pytestmark = pytest.mark.engine

SIMPLER = {
    "stand": ("argmax", "bigram"),
    "consensus": ("last", "first", "most often"),
    "token_recycling": ("last", "most often"),
    "hierarchy": ("context before model", "context before statistics", "model before statistics"),
}
"""Rules that would have drafted something else: without them a test could not tell."""


@pytest.mark.parametrize("name", SIMPLER)
def test_a_published_drafter_drafts_alone_and_by_its_rule(
    name: str, model: Path, prompts: list[list[int]], plain: dict[str, Any]
) -> None:
    """What the worker noted is replayed on a second implementation of the rule, on plain lists (`published.py`)."""
    llm = build(model, {"preset": name})
    try:
        llm.collective_rpc(note_drafter, args=(name,))
        # Greedily, siblings say the same at the same time: the second time there is more to learn from.
        for _ in range(2):
            assert generate(llm, prompts) == plain["greedy"]
        generate(llm, prompts, copies=5, temperature=1.0, own=lambda i: {"seed": i})  # and here they differ
        stats, info = call(llm, "stats"), call(llm, "info")
        (events,) = llm.collective_rpc(noted)
        noise = llm.collective_rpc(noise_of_stand)[0] if name == "stand" else []
    finally:
        close(llm)
    assert not stats["faults"], stats["faults"]
    assert info["preset"] == name and info["state"] == name, info
    assert {arm.split(":")[0] for arm in stats["plays"]} <= {name, "none"}
    rule = made(name, noise)
    found = check(events, rule)
    sources = {name} if name != "hierarchy" else {f"{name}-{x}" for x in ("context", "model", "statistics")}
    assert set(stats["by_source"]) == sources, stats["by_source"]
    assert stats["drafted"] == sum(drafted for _, drafted, _ in stats["by_source"].values()) == found["verified"]
    assert stats["accepted"] > 200, stats
    assert all(rule.differs[simpler] > 50 for simpler in SIMPLER[name]), rule.differs


def made(name: str, noise: list[float]) -> Rule:
    """The rule of a preset; STAND's noise is Gumbel's, by Kolmogorov's test at 0.1 %."""
    if name == "stand":
        uniform = np.sort(np.exp(-np.exp(-np.array(noise))))
        assert np.abs(uniform - np.arange(len(noise)) / len(noise)).max() < 1.95 / np.sqrt(len(noise))
        return Stand(noise)
    return {"consensus": Consensus, "token_recycling": TokenRecycling, "hierarchy": Hierarchy}[name]()
