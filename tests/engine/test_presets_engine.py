"""Presets of published systems in a real engine: they build, draft what they are named for, and change no token."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from engines import build, call, close, generate
from heads import random_head

from rollspec.proposal.base import prompt_key

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
        options["drafter.capture.share"] = 1.0  # few are said: weights are relative to those of a batch
    llm = build(model, options)
    try:
        llm.collective_rpc(_note_weights)
        said = generate(llm, prompts)
        assert said == plain["greedy"]
        asked = [p for p in prompts for _ in range(2)]
        items = [(prompt_key(p), prompt_key(r), float(i % 3)) for i, (p, r) in enumerate(zip(asked, said, strict=True))]
        assert call(llm, "rewards", items=items)["matched"] > 0
        end = time.monotonic() + 60
        while learned and not _enough(llm, name) and time.monotonic() < end:
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
            assert training["steps"] > 0, training
            # Aurora and online distillation learn where the engine rejected a token; the others do not.
            rejected = stats["drafter_levels"].get("loss/rejected")
            assert (rejected is not None and rejected > 0) if name in ("aurora", "osd") else rejected is None, stats
            # ReSpec weights its loss by rewards; the others do not.
            (weights,) = llm.collective_rpc(_weights)
            assert weights and any(abs(w - 1) > 0.05 for w in weights) == (name == "respec"), weights
    finally:
        close(llm)


@pytest.mark.parametrize(
    ("name", "sources"),
    [
        ("token_recycling", {"token_recycling"}),
        ("stand", {"stand"}),
        ("consensus", {"consensus"}),
        ("hierarchy", {"hierarchy-context", "hierarchy-model", "hierarchy-statistics"}),
    ],
)
def test_a_published_drafter_drafts_alone(
    name: str, sources: set[str], model: Path, prompts: list[list[int]], plain: dict[str, Any]
) -> None:
    llm = build(model, {"preset": name})
    try:
        for _ in range(
            2
        ):  # greedily, siblings say the same at the same time: the second time there is more to learn from
            assert generate(llm, prompts) == plain["greedy"]
        stats, info = call(llm, "stats"), call(llm, "info")
        assert not stats["faults"], stats["faults"]
        assert info["preset"] == name and info["state"] == name, info
        assert stats["by_source"] and set(stats["by_source"]) <= sources, stats["by_source"]
        assert stats["accepted"] > 0 and stats["drafted"] == sum(
            drafted for _, drafted, _ in stats["by_source"].values()
        )
        if name == "hierarchy":
            assert "hierarchy-context" in stats["by_source"] and len(stats["by_source"]) > 1, stats["by_source"]
        assert {arm.split(":")[0] for arm in stats["plays"]} <= {name, "none"}
    finally:
        close(llm)


def _note_weights(worker: Any) -> None:
    """Keep what the trainer weights its samples with."""
    from drafter_online import losses

    plain, losses.noted = losses.reward_weights, []

    def noting(*args: Any, **kwargs: Any) -> Any:
        found = plain(*args, **kwargs)
        losses.noted += found.tolist()
        return found

    losses.reward_weights = noting


def _weights(worker: Any) -> list[float]:
    from drafter_online import losses

    return list(losses.noted)


def _enough(llm: Any, name: str) -> bool:
    """Whether it trained, and where rewards weight the loss on samples that have one."""
    if not call(llm, "info")["drafter"]["training"].get("steps", 0):
        return False
    return name != "respec" or any(abs(w - 1) > 0.05 for w in llm.collective_rpc(_weights)[0])
