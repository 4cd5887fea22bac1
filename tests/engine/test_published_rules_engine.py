"""Presets of published rules for the length of drafts in a real engine: each decides by its own formula.

Suffix drafts, so that no head is needed; a second round repeats the first, so that there is much to draft.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import bridge, build, call, close, generate
from noted import note_bandits, noted

pytestmark = pytest.mark.engine


RULES = [
    *("disco", "tetris"),
    *(pytest.param(n, marks=pytest.mark.slow) for n in ("svip", "specdec++", "eesd", "smartspec")),
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
            assert found["rule"] == name
            assert any(k < o for o, k in zip(offered, kept, strict=True)), "no draft was cut"
        if name == "eesd":
            assert min(kept) >= 1 and sum(found["posterior"]) > 12
        if name == "disco":
            assert found["weights"][1] != 1.0 and all(w != 0.0 for w in found["weights"][:2])
    finally:
        close(llm)


@pytest.mark.parametrize("name", ["banditspec", "exp3spec"])
def test_a_bandit_per_prompt_plays_by_its_index_and_is_paid_what_a_verification_emits(
    name: str, model: Path, prompts: list[list[int]], plain: dict[str, Any]
) -> None:
    llm = build(model, {"preset": name})
    try:
        llm.collective_rpc(note_bandits)
        for _ in range(2):
            assert generate(llm, prompts, ignore_eos=True) == plain["long"]
        stats, info = call(llm, "stats"), call(llm, "info")
        ((events, lengths, left),) = llm.collective_rpc(_bandits)
    finally:
        close(llm)
    assert not stats["faults"], stats["faults"]
    assert info["preset"] == name and info["state"] == "suffix" and stats["accepted"] > 0
    assert lengths == [1, 2, 4, 8, 16] and not left, "a prompt's bandit is gone with it"
    found = (ucb_spec if name == "banditspec" else exp3_spec)(events, lengths)
    assert 12 < found.pop("bandits") <= 24 and found["rounds"] > 300, found
    assert all(n > 50 for n in found.values()), found


def ucb_spec(events: list[tuple[Any, ...]], lengths: list[int]) -> Counter[str]:
    """Algorithm 4 of BanditSpec: after every arm once, that of the largest mean_i + bonus_i (eq. 5-7), with δ = 1/2.

    Counts the choices that the means alone, or the bonuses alone, would have made otherwise.
    """
    arms, width, delta = len(lengths), max(lengths), 0.5
    paid: dict[str, list[list[int]]] = {}
    playing: dict[str, int] = {}
    found: Counter[str] = Counter()
    for event, request, *said in events:
        if event == "paid":
            paid[request][playing[request]].append(said[0])
            found["rounds"] += 1
            continue
        arm, offered, kept, _ = said
        rewards = paid.setdefault(request, [[] for _ in lengths])
        playing[request] = arm
        assert kept == min(lengths[arm], offered)
        if not all(rewards):
            assert not rewards[arm], "another arm was never played"
            continue
        n, means = [len(r) for r in rewards], [sum(r) / len(r) for r in rewards]
        log = [math.log(arms * sum(n) ** 2 * math.sqrt(1 + m) / delta) for m in n]
        bonus = [width / 2 * math.sqrt((1 + m) / m**2 * (1 + 2 * x)) for m, x in zip(n, log, strict=True)]
        index = [mean + more for mean, more in zip(means, bonus, strict=True)]
        assert index[arm] > max(index) - 1e-9, (n, means, index, arm)
        found["not the best mean"] += means[arm] < max(means)
        found["not the largest bonus"] += arm != bonus.index(max(bonus))
    found["bandits"] = len(paid)
    return found


def exp3_spec(events: list[tuple[Any, ...]], lengths: list[int]) -> Counter[str]:
    """Algorithms 5 and 9: round t draws by p_i ~ exp(-η_t Σ Z_i), η_t = sqrt(ln K/(t K)), and the loss of the drawn arm
    is Z_i = (L + 1 - y)/(L p_i) (eq. 13, 14).

    Counts the draws from a distribution that is far from even.
    """
    arms, width = len(lengths), max(lengths)
    losses: dict[str, Any] = {}
    rounds: Counter[str] = Counter()
    playing: dict[str, tuple[int, float]] = {}
    found: Counter[str] = Counter()
    for event, request, *said in events:
        if event == "paid":
            arm, chance = playing[request]
            losses[request][arm] += (width + 1 - said[0]) / (width * chance)
            rounds[request] += 1
            continue
        arm, offered, kept, drawn = said
        z = losses.setdefault(request, np.zeros(arms))
        weights = np.exp(-math.sqrt(math.log(arms) / ((rounds[request] + 1) * arms)) * z)
        p = weights / weights.sum()
        assert drawn is not None and drawn[1] == arm, "the arm was not drawn"
        assert np.abs(np.array(drawn[0]) - p).max() < 1e-9, (drawn, p)
        playing[request] = arm, p[arm]
        assert kept == min(lengths[arm], offered)
        found["far from even"] += int(p.max() > 2 / arms)
    return found + Counter(bandits=len(losses), rounds=rounds.total())


def _bandits(worker: Any) -> tuple[list[tuple[Any, ...]], list[int], list[str]]:
    rule = bridge(worker).engine.selection.rule
    return noted(worker), list(rule.lengths), list(rule.learners)


def _note_drafts(worker: Any) -> None:
    """Keep how long drafts were before and after the rule, or per step what the batch was given."""
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

    engine = bridge(worker).engine
    rule, strategy = engine.selection.rule, engine.tuner.strategy
    found = {**engine.selection.noted, "strategy": strategy.name}
    found["rule"] = next((n for n, cls in stopping.RULES.items() if type(rule) is cls), "")
    found["posterior"] = [n for both in getattr(rule, "posteriors", {}).values() for n in both]
    found["weights"] = rule.weights.tolist() if hasattr(rule, "weights") else []
    if strategy.name == "smartspec":
        found["rates"] = {r for b in strategy.state()["buckets"].values() for r in b["rates"]}
    return found
