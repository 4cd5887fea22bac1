"""Presets of published systems in a real engine: they build, draft what they are named for, and change no token."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from engines import build, call, close, generate
from heads import random_head

from drafter_online.train_cli import saved_buffer
from rollspec.config import resolve
from rollspec.proposal.base import prompt_key

pytest.importorskip("speculators")
pytestmark = pytest.mark.engine


# `aurora` is their shorter sibling; for what ReSpec does with rewards it is
# `test_rewards_weight_the_loss_where_they_are_asked_to` (test_drafter_trainer.py).
SLOW = ("osd", "respec", "tlt", "day0")


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
    llm = build(model, options)
    try:
        llm.collective_rpc(_note_plays)
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
            ((plays, paid),) = llm.collective_rpc(_tlt)
            by_bucket: dict[int, list[int]] = {}
            for batch, k in plays:
                by_bucket.setdefault(batch.bit_length(), []).append(k)
            played = [ks[PROFILED:] for ks in by_bucket.values()]
            changes = sum(a != b for ks in played for a, b in pairwise(ks))
            assert paid and sum(map(len, played)) > 40, plays
            assert changes < 0.1 * sum(map(len, played)), "it does not keep to its table"
        if name == "tlt":  # 12 requests at first, fewer later: sets by batch size, and nothing else
            ((arms, paid),) = llm.collective_rpc(_tlt)
            assert arms and all(k in SETS[batch] for batch, k in arms), arms
            assert paid, "no step was paid in measured seconds"
        training = info["drafter"]["training"]
        assert training["error"] is None and info["drafter"]["capture"]["samples"] > 0, info["drafter"]
        assert training["steps"] > 0, training
        # Aurora and online distillation learn where the engine rejected a token; the others do not.
        rejected = stats["drafter_levels"].get("loss/rejected")
        assert (rejected is not None and rejected > 0) if name in ("aurora", "osd") else rejected is None, stats
        if name in ("aurora", "respec"):  # they train beside the engine, also while the policy is updated
            assert training["mode"] == "dedicated" and training["sent"] > 0, training
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
    # The trainer, another process, has the rewards; what it does with them is tested by
    # `test_rewards_weight_the_loss_where_they_are_asked_to`.
    rewards = {s.reward for s in saved_buffer(next((tmp_path / "saved").rglob("drafter/buffer")))}
    assert {0.0, 1.0, 2.0} & rewards, rewards
    assert (resolve(name, env={}).drafter_training.get("reward_beta", 0.0) > 0) == (name == "respec")


def test_das_drafts_from_siblings_and_epochs_and_most_for_the_longest(
    model: Path, prompts: list[list[int]], plain: dict[str, Any]
) -> None:
    """Twelve requests in six places, so that a sibling is ahead; then one of each prompt under the next policy."""
    llm = build(model, {"preset": "das"}, max_num_seqs=6)
    try:
        llm.collective_rpc(_note_shares)
        found = []
        for version, asked in enumerate(([*prompts, *prompts], prompts)):
            call(llm, "set_version", version=version)
            found.append(_says_what_it_would(llm, asked, plain["greedy"][::2]))
        assert call(llm, "info")["preset"] == "das"
        siblings, past = (f["accepted"] for f in found)
        assert siblings > 100 and past > 100, found
        (shares,) = llm.collective_rpc(_shares)
        assert any(abs(w - 1) > 0.05 for w in shares), "requests that will be long get more of the budget"
    finally:
        close(llm)


@pytest.mark.parametrize("name", ["seer", "rhymerl"])
def test_seer_drafts_from_siblings_alone_and_rhymerl_from_the_last_epoch(
    name: str, model: Path, prompts: list[list[int]], plain: dict[str, Any]
) -> None:
    """Each prompt once, once more under the next policy, and then twice in batches of half of them."""
    llm = build(model, {"preset": name}, max_num_seqs=len(prompts))
    try:
        found = []
        for version, asked in enumerate((prompts, prompts, [*prompts, *prompts])):
            call(llm, "set_version", version=version)
            found.append(_says_what_it_would(llm, asked, plain["greedy"][::2])["accepted"])
        assert call(llm, "info")["preset"] == name
        once, again, twice = found  # a response's own beginning drafts for it as well
        assert once > 0, found
        if name == "seer":
            assert again < 1.5 * once and twice > 1.5 * (once + again), found
        else:
            assert again > 2 * once and twice > 1.5 * again, found
            kept = llm.collective_rpc(_kept_versions)[0]
            assert all(versions == [1, 2] for versions in kept), "what was said two epochs ago drafts for nothing"
    finally:
        close(llm)


def _kept_versions(worker: Any) -> list[list[int]]:
    """Policy versions of the responses that each prompt is drafted from."""
    from rollspec.engine.vllm.worker import bridge

    return [sorted({r.version for r in each.responses}) for _, each in bridge(worker).engine.history]


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
        # Greedily, siblings say the same at the same time: the second time there is more to learn from.
        for _ in range(2):
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


def _says_what_it_would(llm: Any, asked: list[list[int]], plain: list[list[int]]) -> dict[str, Any]:
    """Generates greedily what `plain` has for these prompts, in turn, and gives the counts of it."""
    for i, said in enumerate(generate(llm, asked, copies=1)):
        wanted = plain[i % len(plain)]
        assert said[: len(wanted)] == wanted[: len(said)]
    stats: dict[str, Any] = call(llm, "stats")
    assert not stats["faults"], stats["faults"]
    return stats


RULES = [
    *("disco", "tetris"),
    *(
        pytest.param(n, marks=pytest.mark.slow)
        for n in ("exp3spec", "svip", "specdec++", "eesd", "banditspec", "smartspec")
    ),
]


@pytest.mark.parametrize("name", RULES)
def test_a_published_rule_ends_drafts_and_changes_no_token(
    name: str, model: Path, prompts: list[list[int]], plain: dict[str, Any]
) -> None:
    """Suffix drafts, so that no head is needed; the second round repeats the first, so that there is much to draft."""
    llm = build(model, {"preset": name})
    try:
        llm.collective_rpc(_note_drafts)
        for _ in range(2):
            assert generate(llm, prompts) == plain["greedy"]
        stats, info = call(llm, "stats"), call(llm, "info")
        assert not stats["faults"], stats["faults"]
        assert info["preset"] == name and info["state"] == "suffix" and stats["accepted"] > 0
        (found,) = llm.collective_rpc(_ruled)
        offered, kept = found["offered"], found["kept"]
        if name == "smartspec":
            assert found["strategy"] == "smartspec" and len(found["rates"]) > 1, "it learns an acceptance rate"
            solved = found["solved"]
            assert solved and all(k == _best_goodput(*of) for k, *of in solved), solved
            assert len({k for k, *_ in solved}) > 1, "always the same length, whatever it costs and brings"
        elif name == "tetris":
            assert kept and all(taken <= 4 * batch for taken, batch in kept), "the capacity is the batch's"
            assert max(found["longest"]) == 6, "and a likely draft has more than the average"
        else:
            assert found["rule"] == name.replace("banditspec", "ucbspec")
            assert any(k < o for o, k in zip(offered, kept, strict=True)), "no draft was cut"
        if name == "eesd":
            assert min(kept) >= 1 and sum(found["posterior"]) > 12
        if name == "disco":
            assert found["weights"][1] != 1.0 and all(w != 0.0 for w in found["weights"][:2])
        if name in ("banditspec", "exp3spec"):
            assert 12 < found["begun"] <= 24 and not found["learners"], "a bandit of each prompt, gone with it"
            assert set(kept) > {1, 2, 4}
    finally:
        close(llm)


def test_taps_takes_the_most_confident_of_its_heads(
    model: Path, prompts: list[list[int]], plain: dict[str, Any], tmp_path: Path
) -> None:
    loud = random_head(tmp_path / "loud", model, seed=1, scale=0.3)  # larger logits: surer
    options = {
        "preset": "taps",
        "proposal.head.model": str(random_head(tmp_path / "head", model)),
        "proposal.head.specialists": {"code": str(loud)},
    }
    llm = build(model, options)
    try:
        assert generate(llm, prompts) == plain["greedy"]
        stats, heads = call(llm, "stats"), call(llm, "info")["drafter"]["specialists"]
        assert not stats["faults"] and set(stats["plays"]) == {"eagle3:4"}
        assert heads["code"]["drafts"] > heads["general"]["drafts"]
    finally:
        close(llm)


def _note_drafts(worker: Any) -> None:
    """Keep how long drafts were before and after the rule, or per step what the batch was given."""
    from rollspec.engine.vllm.worker import bridge

    selection, strategy = bridge(worker).engine.selection, bridge(worker).engine.tuner.strategy
    selection.noted = {"offered": [], "kept": [], "longest": [], "solved": []}
    if strategy.name == "smartspec":
        choose = strategy.choose

        def choosing(bucket: int) -> int:
            b = strategy._buckets[bucket]
            known = [b[n].tolist() for n in ("seconds", "steps")], b["rates"][strategy._group].tolist()
            chosen: int = choose(bucket)
            (seconds, (steps,)), rates = known
            if all(seconds) and steps % 20 == 1:
                ks = strategy._ks.tolist()
                selection.noted["solved"].append((ks[chosen], seconds, rates, ks))
            return chosen

        strategy.choose = choosing
    if (rule := selection.rule) is not None:
        keep = rule.keep

        def noting(r: Any, p: Any, batch: int) -> Any:
            kept = keep(r, p, batch)
            selection.noted["offered"].append(len(p.expected))
            selection.noted["kept"].append(kept)
            return kept

        rule.keep = noting
    elif selection.config.rule == "tetris":
        allot = selection.allot

        def sharing(chains: Any, step: Any, cost: Any) -> Any:
            lengths = allot(chains, step, cost)
            if step.plan.k and lengths:
                selection.noted["kept"].append((sum(lengths), len(step.asked)))
                selection.noted["longest"].append(max(lengths))
            return lengths

        selection.allot = sharing


def _best_goodput(seconds: list[float], rates: list[float], lengths: list[int]) -> int:
    """The draft length of the most expected tokens per second by SmartSpec's formula; none counts 1.1 times."""
    found = {}
    for t, rate, k in zip(seconds, rates, lengths, strict=True):
        found[k] = sum(rate**i for i in range(int(k) + 1)) / t * (1.0 if k else 1.1)
    return max(found, key=lambda k: found[k])


def _ruled(worker: Any) -> dict[str, Any]:
    from rollspec.drafting import stopping
    from rollspec.engine.vllm.worker import bridge

    engine = bridge(worker).engine
    rule, strategy = engine.selection.rule, engine.tuner.strategy
    found = {**engine.selection.noted, "strategy": strategy.name}
    found["rule"] = next((n for n, cls in stopping.RULES.items() if type(rule) is cls), "")
    found["posterior"] = [n for both in getattr(rule, "posteriors", {}).values() for n in both]
    found["weights"] = rule.weights.tolist() if hasattr(rule, "weights") else []
    found["learners"], found["begun"] = list(getattr(rule, "learners", [])), getattr(rule, "_begun", 0)
    if strategy.name == "smartspec":
        found["rates"] = {r for b in strategy.state()["buckets"].values() for r in b["rates"]}
    return found


PROFILED = 9
"""Steps of ReSpec's profile at a batch size: three of each of its lengths."""

SETS = {b: next(s for most, s in {1: {8}, 4: {4, 8}, 16: {2, 4}}.items() if b <= most) for b in range(1, 13)}
"""Draft lengths of the preset `tlt` by batch size."""


def _note_plays(worker: Any) -> None:
    """Keep the batch size and draft length of every plan, and whether a step was paid by the clock."""
    from rollspec.engine.vllm.worker import bridge

    tuner = bridge(worker).engine.tuner
    tuner.noted, plan, observe = ([], []), tuner.plan, tuner.strategy.observe

    def planning(batch: int, context_tokens: float) -> Any:
        made = plan(batch, context_tokens)
        if batch:
            tuner.noted[0].append((batch, tuner.arms[made.chosen].k))
        return made

    def observing(bucket: int, outcome: Any) -> None:
        tuner.noted[1].append(outcome.measured is not None and outcome.elapsed == outcome.measured)
        observe(bucket, outcome)

    tuner.plan, tuner.strategy.observe = planning, observing


def _tlt(worker: Any) -> tuple[list[tuple[int, int]], bool]:
    from rollspec.engine.vllm.worker import bridge

    plays, paid = bridge(worker).engine.tuner.noted
    return plays, bool(paid) and all(paid)


def _note_shares(worker: Any) -> None:
    """Keep what the tokens of each request counted when the budget was shared."""
    from rollspec.proposal import lengths

    plain, lengths.noted = lengths.weights, []

    def noting(expected: Any, power: float) -> Any:
        found = plain(expected, power)
        lengths.noted += found
        return found

    lengths.weights = noting


def _shares(worker: Any) -> list[float]:
    from rollspec.proposal import lengths

    return list(lengths.noted)
