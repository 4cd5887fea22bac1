"""Presets of systems that train a head, in a real engine: what they train on and when, and how much they draft."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from engines import KV_BYTES, build, call, close, generate
from heads import random_head
from noted import arms_of_strategy, draft_right, note_strategy, noted, profile_of_strategy
from strategies import beg_mab, respec_table

from drafter_online.buffer import Buffer
from drafter_online.model import load
from drafter_online.train_cli import saved_buffer
from drafter_online.trainer import DrafterTraining, Trainer
from drafter_online.versions import Versions
from rollspec.config import resolve
from rollspec.head.training import STATUS_SECONDS
from rollspec.proposal.base import prompt_key

pytest.importorskip("speculators")
pytestmark = pytest.mark.engine


# `aurora` is their shorter sibling; for what ReSpec does with rewards it is
# `test_rewards_weight_the_loss_where_they_are_asked_to` (test_drafter_trainer.py).
SLOW = ("osd", "respec", "tlt", "day0")

SETS = {1: {8}, 4: {4, 8}, 16: {2, 4}, 32: {1, 2}, 64: {0}}
"""Draft lengths of the preset `tlt` by the batch size up to which they hold."""


@pytest.mark.parametrize("name", ["aurora", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_preset_runs_as_it_is(
    name: str, model: Path, prompts: list[list[int]], plain: dict[str, Any], tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "preset": name,
        "proposal.head.model": str(random_head(tmp_path / "head", model)),
        "drafter.dir": str(tmp_path),
        "drafter.capture.share": 1.0,  # few are said: weights are relative to those of a batch
    }
    llm = build(model, options, costs="measured" if name in ("tlt", "respec") else "held")
    try:
        llm.collective_rpc(note_strategy)
        asked = [p for p in prompts for _ in range(2)]

        def rewarded() -> None:
            """Greedy responses, and a reward for each."""
            said = generate(llm, prompts)
            assert said == plain["greedy"]
            both = enumerate(zip(asked, said, strict=True))
            items = [(prompt_key(p), prompt_key(r), float(i % 3)) for i, (p, r) in both]
            assert call(llm, "rewards", items=items)["matched"] > 0

        rewarded()
        end = time.monotonic() + 180
        while not call(llm, "info")["drafter"]["training"].get("steps", 0) and time.monotonic() < end:
            time.sleep(2)  # the engine idles, and a trainer in a process of its own starts
            rewarded()  # one that came late has neither samples nor rewards of before
        rewarded()
        stats, info = call(llm, "stats"), call(llm, "info")
        assert not stats["faults"], stats["faults"]
        assert info["preset"] == name and info["state"] not in ("none", "off"), info
        if name in ("aurora", "osd"):
            assert set(stats["plays"]) == {"eagle3:5"} and stats["drafted"] > 0
        if name == "respec":  # it profiles every length, and keeps to its table until weights move
            assert set(stats["plays"]) == {"eagle3:4", "eagle3:2", "none"} and stats["drafted"] > 0
            (events,) = llm.collective_rpc(noted)
            found = respec_table(events, [0, 2, 4], llm.collective_rpc(profile_of_strategy)[0])
            assert found["by table"] > 100 and found["solved"] > 2 and found["not as modelled"] > 100, found
        if name == "tlt":  # 12 requests at first, fewer later: sets by batch size, and nothing else
            (events,) = llm.collective_rpc(noted)
            found = beg_mab(events, llm.collective_rpc(arms_of_strategy)[0], SETS)
            assert found["greedy"] > 40 and found["not as modelled"] > 20, found
        training = info["drafter"]["training"]
        assert training["error"] is None and info["drafter"]["capture"]["samples"] > 0, info["drafter"]
        assert training["steps"] > 0, training
        # Aurora and online distillation learn where the engine rejected a token; the others do not.
        rejected = stats["drafter_levels"].get("loss/rejected")
        assert (rejected is not None and rejected > 0) if name in ("aurora", "osd") else rejected is None, stats
        assert ("loss/accept_0" in stats["drafter_levels"]) != (name == "osd"), "OSD learns from rejected tokens alone"
        assert training["mode"] == ("dedicated" if name in ("aurora", "respec") else "idle"), training
        if name in ("aurora", "respec"):  # they train beside the engine, also while the policy is updated
            assert training["sent"] > 0, training
            call(llm, "updating", on=True)
            time.sleep(1)
            before = call(llm, "info")["drafter"]["training"]["steps"]
            end = time.monotonic() + 60
            while call(llm, "info")["drafter"]["training"]["steps"] == before:
                assert time.monotonic() < end, "nothing is trained while the policy is updated"
                time.sleep(0.5)
        call(llm, "save", dir=str(tmp_path / "saved" / "replica_0"))
    finally:
        close(llm)
    kept = saved_buffer(next((tmp_path / "saved").rglob("drafter/buffer")))
    assert {0.0, 1.0, 2.0} & (rewards := {s.reward for s in kept}), rewards
    settings = resolve(name, env={}).drafter_training
    losses = [_first_loss(tmp_path / "head", kept, each) for each in (settings, {**settings, "reward_beta": 0.0})]
    assert (abs(losses[0] - losses[1]) > 1e-6) == (name == "respec"), losses


def _first_loss(head: Path, samples: Buffer, settings: dict[str, Any]) -> float:
    """Of a trainer that begins with these samples."""
    return Trainer(load(head, None), samples, DrafterTraining(**settings)).micro_step().terms["loss"]


def _observed(llm: Any) -> tuple[dict[str, Any], dict[str, Any], list[Any], list[int]]:
    """Counts, state, what its strategy noted, and the draft length of each arm."""
    (events,), (lengths,) = llm.collective_rpc(noted), llm.collective_rpc(arms_of_strategy)
    return call(llm, "stats"), call(llm, "info"), events, lengths


def test_tlt_chooses_by_its_bandit_and_drafts_nothing_above_32_requests(
    model: Path, prompts: list[list[int]], plain: dict[str, Any], tmp_path: Path
) -> None:
    """42 requests that leave the batch at different steps, then 12, and both once more."""
    options = {"preset": "tlt", "proposal.head.model": str(random_head(tmp_path / "head", model))}
    room = {"max_num_seqs": 48, "kv_cache_memory_bytes": 4 * KV_BYTES}
    llm = build(model, {**options, "drafter.dir": str(tmp_path)}, costs="measured", **room)
    try:
        llm.collective_rpc(note_strategy)
        for _ in range(2):
            for i, said in enumerate(generate(llm, prompts, copies=7, limit=60)):
                wanted = plain["greedy"][2 * (i // 7)]
                assert said[: len(wanted)] == wanted[: len(said)]
            assert generate(llm, prompts, ignore_eos=True) == plain["long"]
        stats, info, events, lengths = _observed(llm)
    finally:
        close(llm)
    assert not stats["faults"] and info["preset"] == "tlt", stats["faults"]
    found = beg_mab(events, lengths, SETS)
    assert found["greedy"] > 100 and found["drawn"] > 0 and found["not as modelled"] > 100, found
    drafted = [event[1:] for event in events if event[0] == "drafted"]
    assert sum(batch > 32 for batch, _ in drafted) > 30
    assert not any(tokens for batch, tokens in drafted if batch > 32)
    assert all(any(tokens for batch, tokens in drafted if low < batch <= 2 * low) for low in (2, 4, 8, 16))


def test_respec_solves_its_lengths_from_the_profile_that_it_measured(
    model: Path, prompts: list[list[int]], plain: dict[str, Any], tmp_path: Path
) -> None:
    """Every other draft token is replaced by the right one: with a random head no draft would ever pay."""
    options = {
        "preset": "respec",
        "proposal.head.model": str(random_head(tmp_path / "head", model)),
        "drafter.dir": str(tmp_path / "drafter"),
    }
    texts = {prompt_key(p): text for p, text in zip(prompts, plain["long"][::2], strict=True)}
    llm = build(model, options, costs="measured")
    try:
        llm.collective_rpc(draft_right, args=(texts, 2))
        llm.collective_rpc(note_strategy)
        for policy in range(1, 4):
            call(llm, "set_version", version=policy)
            assert generate(llm, prompts, ignore_eos=True) == plain["long"]
        stats, info, events, lengths = _observed(llm)
        (profile,) = llm.collective_rpc(profile_of_strategy)
    finally:
        close(llm)
    assert not stats["faults"] and info["preset"] == "respec" and lengths == [0, 2, 4], stats["faults"]
    found = respec_table(events, lengths, profile)
    assert found["by table"] > 100 and found["solved"] > 4 and found["not as modelled"] > 100, found
    assert found["not the cheapest"] > 0, "no draft was worth its passes"


@pytest.mark.slow  # `test_one_update_of_the_drafter_for_several_of_the_policy` (test_service.py) is its shorter sibling
def test_respec_publishes_one_version_for_two_of_the_policy(
    model: Path, prompts: list[list[int]], plain: dict[str, Any], tmp_path: Path
) -> None:
    options = {
        "preset": "respec",
        "proposal.head.model": str(random_head(tmp_path / "head", model)),
        "drafter.dir": str(tmp_path / "drafter"),
        "drafter.capture.share": 1.0,
        "drafter.publish_every": 2,
    }
    llm = build(model, options)
    versions = Versions(tmp_path / "drafter" / "versions")

    def published() -> int:
        """Versions so far, where the daemon has fresh samples and has been asked to judge a canary."""
        assert generate(llm, prompts) == plain["greedy"]
        return max(versions.numbers(), default=0)

    try:
        found = []
        for policy in range(1, 6):
            call(llm, "set_version", version=policy)
            time.sleep(STATUS_SECONDS + 0.5)  # until the daemon knows it
            before = published()
            if policy % 2:
                end = time.monotonic() + 240
                while published() == before:
                    assert time.monotonic() < end, "nothing is published"
                    time.sleep(4)  # the engine idles, and the trainer has its turn
                time.sleep(STATUS_SECONDS + 0.5)  # until the engine knows how much was trained
            steps = call(llm, "info")["drafter"]["training"]["steps"]
            found.append({published() for _ in range(4)})
            assert call(llm, "info")["drafter"]["training"]["steps"] == steps, "it trains while it waits"
        stats, info = call(llm, "stats"), call(llm, "info")
    finally:
        close(llm)
    assert all(len(each) == 1 for each in found) and found[0] == found[1] != found[2] == found[3] != found[4], found
    assert not stats["faults"] and info["preset"] == "respec", stats["faults"]
