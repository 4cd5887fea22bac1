"""Presets of published systems in a real engine: they build, draft what they are named for, and change no token."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import pytest
from budgets import by_length
from engines import build, call, close, generate
from heads import random_head
from noted import note_budget, note_drafter, note_heads, noted
from published import origins

pytest.importorskip("speculators")
pytestmark = pytest.mark.engine


def test_das_drafts_from_siblings_and_epochs_and_most_for_the_longest(
    model: Path, prompts: list[list[int]], plain: dict[str, Any]
) -> None:
    """Twelve requests in six places, so that a sibling is ahead; then one of each prompt under the next policy."""
    llm = build(model, {"preset": "das"}, max_num_seqs=6)
    try:
        llm.collective_rpc(note_drafter, args=("suffix",))
        llm.collective_rpc(note_budget)
        found, rounds = [], []
        for version, asked in enumerate(([*prompts, *prompts], prompts)):
            call(llm, "set_version", version=version)
            found.append(_says_what_it_would(llm, asked, plain["greedy"][::2]))
            (events,) = llm.collective_rpc(noted)
            rounds.append(events[sum(map(len, rounds)) :])
        assert call(llm, "info")["preset"] == "das"
    finally:
        close(llm)
    siblings, past = (f["accepted"] for f in found)
    assert siblings > 100 and past > 100, found
    seen = origins([[e for e in each if e[0] != "draft" or e[4] == "group"] for each in rounds])
    assert seen["past",] > 5 and seen["running",] + seen["ended",] > 5, seen
    shared = by_length(events, power=0.5)
    assert shared["steps"] > 40 and shared["known"] > 10, shared
    assert all(shared[f"not the {n}"] > 5 for n in ("likeliest", "shortest")) and shared["more of the longest"] > 3


@pytest.mark.parametrize("name", ["seer", "rhymerl"])
def test_seer_drafts_from_siblings_alone_and_rhymerl_from_the_last_epoch(
    name: str, model: Path, prompts: list[list[int]], plain: dict[str, Any]
) -> None:
    """Each prompt once, once more under the next policy, and then twice in batches of half of them; for Seer with
    sampled siblings, which go their own ways.
    """
    llm = build(model, {"preset": name}, max_num_seqs=len(prompts))
    try:
        llm.collective_rpc(note_drafter, args=("suffix",))
        found, rounds = [], []
        for version, asked in enumerate((prompts, prompts, [*prompts, *prompts])):
            call(llm, "set_version", version=version)
            found.append(_says_what_it_would(llm, asked, plain["greedy"][::2])["accepted"])
            (events,) = llm.collective_rpc(noted)
            rounds.append(events[sum(map(len, rounds)) :])
        if name == "seer":
            generate(llm, prompts, copies=4, temperature=1.0, own=lambda i: {"seed": i})
            (events,) = llm.collective_rpc(noted)
            rounds[-1] += events[sum(map(len, rounds)) :]
        assert call(llm, "info")["preset"] == name
        seen = origins(rounds)
        allowed = {"prompt", "own", "running", "ended"} if name == "seer" else {"prompt", "ended", "past"}
        assert all(allowed & set(each) for each in seen), seen
        once, again, twice = found  # a response's own beginning drafts for it as well
        assert once > 0, found
        if name == "seer":
            alone = sum(n for each, n in seen.items() if allowed & set(each) == {"running"})
            assert alone > 40, f"drafts that only a sibling that runs can have given: {alone}, of {seen}"
            assert again < 1.5 * once and twice > 1.5 * (once + again), found
        else:
            assert again > 2 * once and twice > 1.5 * again, found
            assert seen["past",] > 0, seen
            kept = llm.collective_rpc(_kept_versions)[0]
            assert all(versions == [1, 2] for versions in kept), "what was said two epochs ago drafts for nothing"
    finally:
        close(llm)


def _kept_versions(worker: Any) -> list[list[int]]:
    """Policy versions of the responses that each prompt is drafted from."""
    from rollspec.engine.vllm.v2.install import bridge

    return [sorted({r.version for r in each.responses}) for _, each in bridge(worker).engine.history]


def _says_what_it_would(llm: Any, asked: list[list[int]], plain: list[list[int]]) -> dict[str, Any]:
    """Generates greedily what `plain` has for these prompts, in turn, and gives the counts of it."""
    for i, said in enumerate(generate(llm, asked, copies=1)):
        wanted = plain[i % len(plain)]
        assert said[: len(wanted)] == wanted[: len(said)]
    stats: dict[str, Any] = call(llm, "stats")
    assert not stats["faults"], stats["faults"]
    return stats


def test_taps_takes_the_most_confident_of_its_heads(
    model: Path, prompts: list[list[int]], plain: dict[str, Any], tmp_path: Path
) -> None:
    """Two that are about as sure as each other, so that each wins at times."""
    options = {
        "preset": "taps",
        "proposal.head.model": str(random_head(tmp_path / "head", model)),
        "proposal.head.specialists": {"code": str(random_head(tmp_path / "code", model, seed=1))},
    }
    llm = build(model, options)
    try:
        llm.collective_rpc(note_heads)
        assert generate(llm, prompts) == plain["greedy"]
        stats, heads = call(llm, "stats"), call(llm, "info")["drafter"]["specialists"]
        (events,) = llm.collective_rpc(noted)
    finally:
        close(llm)
    assert not stats["faults"] and set(stats["plays"]) == {"eagle3:4"}
    assert all(each["drafts"] > 0 for each in heads.values()), heads
    won: Counter[str] = Counter()
    for _, proposed, draft in events:
        sure = {head: sum(accumulate(probs, mul)) for head, (_, probs) in proposed.items()}
        best = max(sure.values())
        said = {head: tokens[: len(draft)] for head, (tokens, _) in proposed.items()}
        assert draft in [said[head] for head in sure if sure[head] > best - 1e-6], (proposed, draft)
        won.update(head for head in sure if sure[head] == best and list(said.values()).count(draft) == 1)
    assert len(won) == 2 and min(won.values()) > 20, "only one head was ever the surer one"
