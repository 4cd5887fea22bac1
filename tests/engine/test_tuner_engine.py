"""The tuner in a real vLLM engine: whatever it decides, what is sampled stays the same.

float32 and greedy, so every comparison is token identity.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import bridge, build, call, close, generate, metric
from switching import any_arm

pytestmark = pytest.mark.engine


def _garbage(worker: Any) -> None:
    import random

    from rollspec.proposal.base import Draft

    rng = random.Random(0)
    engine = bridge(worker).engine
    vocabulary = worker.model_runner.model_config.get_vocab_size()

    def draft(groups: Any, contexts: Any, rooms: list[int]) -> list[Draft]:
        return [Draft([rng.randrange(vocabulary) for _ in range(k)], [0.99] * k, "group", 16) for k in rooms]

    engine.suffix.draft = draft
    engine.tuner.guard.patience = 20  # the texts are short


def _longest(worker: Any) -> None:
    """The longest drafts at every step, whatever they cost."""
    tuner = bridge(worker).engine.tuner
    tuner.strategy.choose = lambda bucket: len(tuner.arms) - 1
    tuner.config = tuner.config.model_copy(update={"guard": tuner.config.guard.model_copy(update={"enabled": False})})


def _strategy(worker: Any) -> tuple[str, list[str]]:
    """The strategy that decides in this engine, and the arms that it has."""
    tuner = bridge(worker).engine.tuner
    return type(tuner.strategy).name, [arm.name for arm in tuner.arms]


def test_tokens_are_identical_under_any_switch_and_any_pressure(
    model: Path, prompts: list[list[int]], plain: dict[str, Any], tmp_path: Path
) -> None:
    """Random arms every step, prompts computed in chunks, and a KV cache so small that requests are preempted."""
    tight = {"max_num_batched_tokens": 160, "enable_chunked_prefill": True, "num_gpu_blocks_override": 8}
    long = {"ignore_eos": True}  # every request then outgrows its first block of 128 tokens
    llm = build(model, {"preset": "default", "history.dir": str(tmp_path)}, **tight)
    try:
        llm.collective_rpc(any_arm)
        for version in range(2):
            call(llm, "set_version", version=version)
            assert generate(llm, prompts, **long) == plain["long"]
        seeded = {"copies": 1, "limit": 120, "seed": 5, "temperature": 1.0}
        assert generate(llm, prompts, **long, **seeded) == plain["seeded"], "a seed means one text, whatever is drafted"
        stats = call(llm, "stats")
        assert len(stats["plays"]) == 6 and not stats["faults"]
        assert stats["accepted"] > 0 and stats["steps"] > stats["plays"]["none"] > 0
        assert metric(llm, "num_preemptions") > 0, "the cache was meant to be too small"
    finally:
        close(llm)


def test_what_was_learned_is_saved_and_reported(
    model: Path, prompts: list[list[int]], plain: dict[str, Any], tmp_path: Path
) -> None:
    from rollspec.telemetry.engine_stats import EngineStats
    from rollspec.telemetry.metrics import to_metrics

    llm = build(model, {"preset": "default", "history.dir": str(tmp_path)}, costs="measured")
    try:
        for version in range(3):
            call(llm, "set_version", version=version)
            assert generate(llm, prompts) == plain["greedy"]
        generate(llm, prompts, copies=2, temperature=1.0)
        stats = call(llm, "stats")
        m = to_metrics(EngineStats.from_dict(stats))
        # What times say on a busy machine is not judged here, only that they were turned into these figures.
        assert m["rollspec/rollout/speedup"] > 0.0
        assert m["rollspec/rollout/speedup_clairvoyant"] >= m["rollspec/rollout/speedup"] - 1e-9
        assert m["rollspec/rollout/speedup_perfect"] > 0.0
        # The oracle plays one arm per batch bucket, so no fixed arm beats it; the tuner may, step by step.
        modelled = stats["modelled"]
        assert m["rollspec/rollout/speedup_oracle"] >= m["rollspec/rollout/speedup_best_fixed"] - 1e-9
        assert m["rollspec/tuner/regret"] == pytest.approx(modelled["played"] / modelled["oracle"] - 1)
        clock = modelled["clock/played"] / modelled["clock/oracle"] - 1
        assert m["rollspec/tuner/regret_measured"] == pytest.approx(clock), "steps were timed"
        assert modelled["clairvoyant"] <= min(modelled["played"], modelled["oracle"]) * (1 + 1e-9)
        assert 0.0 < m["rollspec/accept/max_acceptance"] <= 1.0
        assert m["rollspec/tuner/cost_error"] > 0.0
        assert call(llm, "info")["cost"]["fitted"]
        call(llm, "save", dir=str(tmp_path))
        # Useless drafts, always the longest: by then the oracle drafts nothing, and all that is verified is regretted.
        llm.collective_rpc(_garbage)
        llm.collective_rpc(_longest)
        assert generate(llm, prompts) == plain["greedy"]
        stats = call(llm, "stats")
        m = to_metrics(EngineStats.from_dict(stats))
        assert stats["modelled"]["oracle"] <= stats["modelled"]["fixed/none"] * (1 + 1e-9)
        # How much is the machine's to say: the costs are measured.
        assert m["rollspec/tuner/regret"] > 0.0 and m["rollspec/rollout/speedup"] < 1.0, m
    finally:
        close(llm)
    assert (tmp_path / "tuning.json").is_file()
    again = build(model, {"preset": "default", "history.dir": str(tmp_path)}, costs="measured")
    try:
        assert call(again, "info")["cost"]["fitted"], "the stored fit was not taken"
        assert generate(again, prompts) == plain["greedy"]
        (tmp_path / "tuning.json").write_text("{")
        answer = call(again, "load", dir=str(tmp_path))
        assert answer["responses"] > 0 and "is refused" in answer["tuning"]
        assert any("tuning" in cause for cause in call(again, "stats")["faults"])
    finally:
        close(again)


def test_a_garbage_drafter_is_switched_off_and_changes_nothing(
    model: Path, prompts: list[list[int]], plain: dict[str, Any]
) -> None:
    off = {"tuning.strategy": "static", "proposal.budget.rule": "fixed"}
    llm = build(model, {"preset": "default", **off})
    try:
        llm.collective_rpc(_garbage)
        for _ in range(2):
            assert generate(llm, prompts) == plain["greedy"]
        stats = call(llm, "stats")
        assert stats["alarms"] >= 1 and stats["drafters_off"]
        assert stats["plays"]["none"] > 0.3 * stats["steps"]
    finally:
        close(llm)


OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("exp3spec", "ucbspec", "beg_mab", "thompson")]


@pytest.mark.parametrize("strategy", ["table", *OTHERS])
def test_published_strategies_run_and_change_nothing(
    model: Path, prompts: list[list[int]], plain: dict[str, Any], strategy: str
) -> None:
    options = {"table": {"4": 8, "16": 2}} if strategy == "table" else {}
    llm = build(model, {"preset": "default", "tuning": {"strategy": strategy, "options": options}})
    try:
        for version in range(2):
            call(llm, "set_version", version=version)
            assert generate(llm, prompts) == plain["greedy"]
        stats = call(llm, "stats")
        assert not stats["faults"] and stats["accepted"] > 0
        ((named, arms),) = llm.collective_rpc(_strategy)
        assert named == strategy and set(stats["plays"]) <= set(arms)
        if strategy == "table":  # by batch size alone: 12 requests at first, fewer later
            assert {"suffix:2", "suffix:8"} <= set(stats["plays"]) <= {"suffix:2", "suffix:8", "none"}, stats["plays"]
        else:  # a learner tries several
            assert len(stats["plays"]) > 2, stats["plays"]
    finally:
        close(llm)
