from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from step_world import simulate, story

from rollspec import RollspecConfig
from rollspec.drafting.head import CANARY_EVERY, EARLY_EVERY, KNOWN, PROBE_EVERY
from rollspec.step import DraftEngine
from rollspec.tuning.guard import Guard
from rollspec.tuning.tuner import Plan

pytestmark = pytest.mark.usefixtures("steady_clock")


def make(**overrides: Any) -> DraftEngine:
    given = {"proposal.drafters": ["suffix", "eagle3"], "proposal.head.model": "x", **overrides}
    return DraftEngine(RollspecConfig.load("default", overrides=given, env={}), 4096, "eagle3")


def texts(n: int, seed: int = 0) -> dict[str, tuple[list[int], list[int]]]:
    return {f"{seed}-{i}": ([1, 2, 3 + i], story(100 * seed + i, 150)) for i in range(n)}


def test_a_good_draft_head_serves_what_was_never_said_before() -> None:
    p = make()
    steps = simulate(p, texts(4), 0.9)
    stats = p.drain()
    drafts, drafted, accepted = stats.by_source["eagle3"]
    assert drafts > 50 and accepted > 0.7 * drafted and stats.passes > 0
    assert steps < 0.6 * 150


def test_suffix_chains_are_preferred_where_they_reach_further() -> None:
    p = make()
    simulate(p, texts(4), 0.9)
    p.set_version(1)
    p.drain()
    again = {f"again-{k}": v for k, v in texts(4).items()}
    simulate(p, again, 0.5)
    stats = p.drain()
    assert stats.by_source["group"][2] > 5 * stats.by_source.get("eagle3", [0, 0, 0])[2]
    assert stats.passes < 0.5 * stats.steps, "passes are not run for requests that suffix serves"


def test_a_useless_drafter_rests_and_is_probed() -> None:
    p = make()
    for seed in range(4):
        simulate(p, texts(4, seed), 0.0)
    p.drain()
    steps = sum(simulate(p, texts(4, 10 + seed), 0.0) for seed in range(3))
    stats = p.drain()
    assert 1 <= stats.passes <= 3 + 3 * steps / PROBE_EVERY
    assert stats.by_source.get("eagle3", [0, 0, 0])[1] < 20
    # A canary is judged sooner, by unverified passes as well.
    p.canary_runs = True
    steps = simulate(p, texts(4, 15), 0.0)
    stats = p.drain()
    assert stats.passes > 3 * steps / PROBE_EVERY and stats.passes >= 0.5 * steps / (CANARY_EVERY + 1)
    assert stats.by_source.get("eagle3", [0, 0, 0])[1] < 20
    p.canary_runs = False
    # New weights: it is tried at once, and found good.
    p.swapped(1)
    simulate(p, texts(4, 20), 0.95)
    assert p.drain().by_source["eagle3"][2] > 100


def test_reading_what_was_missed_is_no_part_of_what_a_pass_costs() -> None:
    p = make()
    p.head.rested = False
    p.passed(1, 0.1, 4, late=0.09)
    assert p.head.cost.each == pytest.approx(0.01)
    assert p.stats.pass_seconds == pytest.approx(0.1)


def test_a_pass_after_a_rest_says_nothing_of_what_a_pass_costs() -> None:
    """Its weights are in no cache: it takes several times as long, and a good head would never be run again."""
    p = make()
    p.begin("a", [1, 2], 64)
    ran = []
    for i in range(6):
        ran.append(p.prepare(["a"], [[5 + i]], {}))
        if ran[-1]:
            p.passed(ran[-1], (0.5 if p.head.rested else 0.001) * ran[-1], 1)
        p.complete([[6 + i] * ran[-1]] if ran[-1] else None)
    assert ran[0] and ran[1], "the first one cost half a second, and it was run again"
    assert p.head.cost.each == pytest.approx(0.001)


def test_a_probe_corrects_passes_that_once_seemed_too_dear() -> None:
    """The first pass in a row compiled something: after it the head rests, and only probes are timed."""
    p = make()
    simulate(p, texts(1), 0.9, pass_seconds=0.05)
    assert p.head.cost.each > 0.02 and p.head.acceptance.tries[0] > 0
    for seed in range(3):
        simulate(p, texts(4, 1 + seed), 0.9)
    p.drain()
    simulate(p, texts(4, 9), 0.9)
    assert p.head.cost.seconds(4, 4, 0.0) == pytest.approx(4 * 0.0005)
    assert p.drain().by_source["eagle3"][2] > 100


def test_a_probe_reaches_as_far_as_the_head_may() -> None:
    p = make()
    p.tuner.plan = lambda batch, context_tokens: Plan(0, p.tuner.none, p.tuner.none, 0, 1)  # type: ignore[method-assign]
    p.begin("a", [1, 2], 4000)
    ran: list[int] = []
    for _ in range(50 * EARLY_EVERY):
        ran.append(p.prepare(["a"], [[5]], {}))
        p.complete([[5, *[9] * 7][: ran[-1]]] if ran[-1] else None)  # the first token is what the target says
    probes = [n for n in ran if n]
    assert len(probes) >= KNOWN and probes[0] == 5 and probes[-1] == 8, "often, until something is known"
    assert ran[-EARLY_EVERY:].count(0) >= EARLY_EVERY - 1 and p.head.acceptance.tries[0] <= KNOWN + 2
    assert (p.head.acceptance.rates > 0.8).all(), "good at its first token, and so hoped to be at others"


def test_what_was_missed_is_part_of_what_it_costs_to_begin_again() -> None:
    """In a full batch reading it takes longer than a step: probes are rare then."""
    for acceptance, late, most in ((0.3, 0.3, 0.06), (0.6, 0.1, 0.2)):
        p = make()
        for seed in range(4):
            simulate(p, texts(16, seed), acceptance, late=late)
        p.drain()
        steps = sum(simulate(p, texts(16, 10 + seed), acceptance, late=late) for seed in range(3))
        stats = p.drain()
        assert stats.pass_seconds / (0.015 * steps) < most
        assert (stats.passes > 200) == (acceptance == 0.6), "a good head begins again all the same"


def test_arms_with_a_head_that_does_not_run_are_credited_with_nothing_of_it() -> None:
    """Passes that cost more than they give: what the head might have said is no reason to choose its arms."""
    p = make()
    simulate(p, texts(2), 0.9, pass_seconds=0.2)
    seen = []
    observe = p.tuner.strategy.observe

    def noting(bucket: int, outcome: Any) -> None:
        seen.append((outcome.emitted.tolist(), outcome.seconds.tolist()))
        observe(bucket, outcome)

    p.tuner.strategy.observe = noting  # type: ignore[method-assign]
    simulate(p, texts(2, 3), 0.9, pass_seconds=0.2)
    model = p.tuner.with_model
    with_head, without = (np.flatnonzero(x & (p.tuner.ks > 0)) for x in (model, ~model))
    rests = [(e, s) for e, s in seen if [e[i] for i in with_head] == [e[i] for i in without]]
    assert len(rests) > 0.9 * len(seen)
    assert all([s[i] for i in with_head] == [s[i] for i in without] for _, s in rests)


def test_dear_passes_are_not_run() -> None:
    p = make()
    for seed in range(2):
        simulate(p, texts(2, seed), 0.5, pass_seconds=0.05)
    p.drain()
    simulate(p, texts(2, 5), 0.5, pass_seconds=0.05)
    stats = p.drain()
    assert stats.passes < 0.1 * stats.steps


def test_a_drafter_that_cannot_run_leaves_the_suffix_drafts() -> None:
    p = make()
    simulate(p, texts(4), 0.9, fail=True)
    p.resting = True
    p.set_version(1)
    p.drain()
    simulate(p, {f"again-{k}": v for k, v in texts(4).items()}, 0.9)
    stats = p.drain()
    assert stats.passes == 0 and "eagle3" not in stats.by_source and stats.by_source["group"][2] > 300


def test_alone_it_needs_no_trees() -> None:
    p = make(**{"proposal.drafters": ["eagle3"]})
    simulate(p, texts(4), 0.9)
    stats = p.drain()
    assert set(stats.by_source) == {"eagle3"}
    assert [a.name for a in p.tuner.arms] == ["none", "eagle3:1", "eagle3:2", "eagle3:4", "eagle3:8", "eagle3:16"]


def test_arms_are_drafter_sets_and_lengths() -> None:
    names = [a.name for a in make(**{"proposal.k_max": 2}).tuner.arms]
    assert names == ["none", "suffix:1", "suffix+eagle3:1", "suffix:2", "suffix+eagle3:2"]


def test_the_guard_holds_back_one_drafter_and_not_the_other() -> None:
    p = make(**{"tuning.strategy": "static", "proposal.budget.rule": "fixed"})
    p.tuner.guard = Guard(patience=10)
    simulate(p, texts(4), 1.0, seed=1)
    for seed in range(3):
        p.set_version(seed + 1)
        p.drain()
        simulate(p, {f"{seed}-{k}": v for k, v in texts(4).items()}, 0.0, seed=seed)
    off = p.tuner.guard.off
    assert any(o.startswith("eagle3@") for o in off) or p.drain().by_source.get("eagle3", [0, 0])[1] < 60
    assert not any(o.startswith("suffix@") for o in off)


def test_a_draft_is_scored_once() -> None:
    """While nothing is verified only some requests are drafted for; what the others were proposed before is over."""
    p = make()
    for r in ("a", "b"):
        p.begin(r, [1, 2, 3], 50)
    p.prepare(["a", "b"], [[7], [7]], {})
    p.complete([[8, 9], [8, 9]])
    assert p.requests["a"].head.draft.token_ids == [8, 9]
    tries = p.head.acceptance.tries.copy()
    p.tuner.plan = lambda batch, context_tokens: type(p._step.plan)(0, p.tuner.none, p.tuner.none, 0, 2)  # type: ignore[method-assign]
    p.prepare(["a", "b"], [[8], [8]], {})
    p.complete(None)
    after = p.head.acceptance.tries.copy()
    assert after[0] == tries[0] + 2
    p.prepare(["a", "b"], [[8], [8]], {})
    assert (p.head.acceptance.tries == after).all()


def test_what_is_known_of_a_version_is_kept_for_that_version() -> None:
    p = make()
    p.swapped(3)
    simulate(p, texts(4), 0.9)
    kept = json.loads(json.dumps(p.tuning_state()))
    rates = p.head.acceptance.rates
    assert kept["drafter"]["version"] == 3 and rates[0] > 0.8
    again = make()
    again.restore_tuning(kept)  # the engine starts with the head it was given; version 3 comes at its first step
    assert again.head.acceptance.rates[0] == pytest.approx(0.6)
    assert again.head.cost.seconds(4, 2, 1.0) == p.head.cost.seconds(4, 2, 1.0)
    again.swapped(3)
    assert again.head.acceptance.rates == pytest.approx(rates)
    again.swapped(4)
    assert not again.head.acceptance.measured.any(), "other weights"
    elsewhere = make()
    elsewhere.restore_tuning({k: v for k, v in kept.items() if k not in ("tuner", "passes")})  # as on another machine
    elsewhere.swapped(3)
    assert elsewhere.head.acceptance.rates == pytest.approx(rates) and elsewhere.head.cost.each == 0.0
    broken = make()
    with pytest.raises((ValueError, KeyError, TypeError)):
        broken.restore_tuning({**kept, "drafter": {"version": 3, "acceptance": {}}})
    broken.swapped(3)
    assert broken.head.acceptance.rates[0] == pytest.approx(0.6)


def test_a_sent_chain_carries_the_version_that_drafted_it() -> None:
    p = make(**{"proposal.budget.rule": "fixed", "tuning.strategy": "static"})
    p.swapped(3)
    p.begin("a", [1, 2, 3], 50)
    passes = p.prepare(["a"], [[4]], {})
    assert p.complete([[5] * max(passes, 1)])[0]
    r = p.requests["a"].head
    assert r.sent and r.version == 3
    p.swapped(4)
    assert r.version == 3, "what is being verified is the old weights'"


def test_a_head_that_is_always_right_serves_what_the_engine_would_have_said() -> None:
    p, text = make(), story(1, 150)
    p.begin("a", [1, 2, 3], len(text))
    draft: list[int] = []
    steps = at = 0
    while at < len(text):
        n = next((i for i, t in enumerate(draft) if t != text[at + i]), len(draft))
        new, at = text[at : at + n + 1], at + n + 1
        p.timed(1 + len(draft), True, 0.01, 1)
        passes = p.prepare(["a"], [new], {"a": draft} if draft else {}, float(at))
        if passes:
            p.passed(passes, 0.0001 * passes, 1)
        (draft,) = p.complete([text[at : at + passes]]) if passes else p.complete()
        steps += 1
    stats = p.drain()
    assert p.requests["a"].output == text and steps < 0.6 * len(text)
    assert stats.steps == steps and stats.passes > 0 and stats.by_source["eagle3"][2] == stats.accepted


def test_a_stop_rule_learns_of_each_proposal_what_was_emitted_of_it() -> None:
    """Memory's proposal is judged by its own tokens, also where the head's is preferred."""
    p = make(**{"proposal.budget.rule": "disco", "proposal.head.k_max": 4})
    rule, seen = p.selection.rule, set()
    assert rule is not None
    learn = rule.learn

    def noting(r: Any, proposal: Any, accepted: int, *rest: int) -> None:
        n, chain = 0, proposal.draft.token_ids[: len(proposal.cells)]
        while n < min(len(chain), len(r.emitted)) and chain[n] == r.emitted[n]:
            n += 1
        assert accepted == n
        seen.add((proposal is r.head, r.head.serves))
        learn(r, proposal, accepted, *rest)

    rule.learn = noting  # type: ignore[method-assign]
    simulate(p, texts(4), 0.9)
    p.set_version(1)
    simulate(p, {f"again-{k}": v for k, v in texts(4).items()}, 0.6)
    assert seen == {(head, serves) for head in (False, True) for serves in (False, True)}
