"""Presets of published rules for the length of drafts in a real engine: each decides by its own formula.

Suffix drafts, so that no head is needed; a second round repeats the first, so that there is much to draft.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import bridge, build, call, close, generate
from noted import Drafted, note_bandits, note_steps, noted

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
        llm.collective_rpc(_note_solutions if name == "smartspec" else note_steps)
        for _ in range(2):
            assert generate(llm, prompts) == plain["greedy"]
        generate(llm, prompts, copies=5, temperature=1.2, own=lambda i: {"seed": i})  # what follows is less sure
        stats, info = call(llm, "stats"), call(llm, "info")
        (events,) = llm.collective_rpc(noted)
    finally:
        close(llm)
    assert not stats["faults"], stats["faults"]
    assert info["preset"] == name and info["state"] == "suffix" and stats["accepted"] > 0
    if name == "smartspec":
        assert len({tuple(rates) for _, _, rates, _ in events}) > 1, "it learns an acceptance rate"
        assert events and all(k == _best_goodput(*of) for k, *of in events), events
        assert len({k for k, *_ in events}) > 1, "always the same length, whatever it costs and brings"
    elif name == "tetris":
        found = likeliest(events)
        assert found["steps"] > 40 and found["not the first"] > 20 and found["not evenly"] > 20, found
    else:
        found = by_rule(events, {"svip": Svip, "specdec++": SpecDec, "eesd": Eesd, "disco": Disco}[name]())
        assert found["whole"] > 20 and found["cut"] > 20 and found["simpler"] > 20, found


def likeliest(events: list[tuple[Any, ...]]) -> Counter[str]:
    """TETRIS: of all that six tokens per request bring, a step verifies the likeliest four times as many as requests.

    Counts the steps where whole drafts in their order, or four tokens of each, would have been others.
    """
    found: Counter[str] = Counter()
    for _, _, k, _, rows in events:
        drafts, kept, room = [Drafted(*row).expected for row, _ in rows], [n for _, n in rows], 4 * len(rows)
        if not k:
            continue
        assert k == 6
        every = [p for draft in drafts for p in draft]
        wanted = sorted(every, reverse=True)[:room]
        taken = [p for draft, n in zip(drafts, kept, strict=True) for p in draft[:n]]
        assert sorted(taken, reverse=True) == wanted, (drafts, kept)
        found["steps"] += 1
        found["not the first"] += sorted(every[:room], reverse=True) != wanted
        found["not evenly"] += sorted((p for draft in drafts for p in draft[:4]), reverse=True) != wanted
    return found


def by_rule(events: list[tuple[Any, ...]], rule: Svip) -> Counter[str]:
    """What is handed over of each draft ends where the rule ends it. Counts how often that is where a simpler one does
    not.
    """
    found: Counter[str] = Counter()
    for event, batch, *said in events:
        if event == "learned":
            rule.learns(Drafted(*said[0]), batch, *said[1:])
            continue
        k, _, rows = said
        for row, kept in rows:
            draft = Drafted(*row)
            if most := len(draft.expected):
                ends = rule.ends(draft, batch)
                assert kept == min(ends, k), (draft, kept, ends)
                found["cut" if ends < most else "whole"] += 1
                found["simpler"] += ends != rule.simpler(draft)
    return found


class Svip:
    """Up to a token that is less likely than not, or of more than 0.7 for the root of the entropy of {f, 1 - f}."""

    bound = 0.4

    def ends(self, d: Drafted, batch: int) -> int:
        """Tokens of a draft that are kept."""
        fs = [min(f, 1.0) for f in each(d.own)]
        entropy = [-sum(x * math.log(x) for x in (f, 1.0 - f) if x) for f in fs]
        return first(f < 0.5 or math.sqrt(h) > 0.7 for f, h in zip(fs, entropy, strict=True))

    def learns(self, d: Drafted, batch: int, came: int, known: int, verified: int, accepted: int) -> None:
        """What became of a draft."""

    def simpler(self, d: Drafted) -> int:
        """A bound on the calibrated chance of each token."""
        return first(p < self.bound for p in each(d.expected))


class SpecDec(Svip):
    """Up to a token with which the chance that any is rejected is above 0.7."""

    bound = 0.3

    def ends(self, d: Drafted, batch: int) -> int:
        return first(1.0 - p > 0.7 for p in d.expected)


class Eesd(Svip):
    """One token, and one more while Q ~ Bernoulli(θ), θ ~ Beta(1 + accepted, 1 + rejected), of the same seed."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.posteriors: dict[str, list[int]] = {}  # by drafter

    def ends(self, d: Drafted, batch: int) -> int:
        if (more := len(d.expected) - 1) < 1:
            return 1
        uniform, theta = self.rng.random(more), self.rng.beta(*self.posteriors.get(d.source, (1, 1)), more)
        return 1 + first(u >= x for u, x in zip(uniform, theta, strict=True))

    def learns(self, d: Drafted, batch: int, came: int, known: int, verified: int, accepted: int) -> None:
        if verified:
            both = self.posteriors.setdefault(d.source, [1, 1])
            both[0] += accepted
            both[1] += accepted < verified


class Disco(Svip):
    """Up to a token with σ(w · x) < 0.4; w follows the log loss of all known tokens by AdaGrad from `simpler` on."""

    def __init__(self) -> None:
        self.w, self.squares = np.array([0.0, 1.0, 0.0, 0.0, 0.0, 0.0]), np.zeros(6)

    def chances(self, d: Drafted, batch: int, most: int) -> tuple[Any, Any]:
        """x and σ(w · x) of the first tokens of a draft from suffixes."""
        pairs = zip(each(d.expected)[:most], each(d.own)[:most], strict=True)
        rows = [
            (1, odds(c), math.log2(i), odds(q), math.log2(d.match + i), math.log2(batch))
            for i, (c, q) in enumerate(pairs, 1)
        ]
        x = np.array(rows, float)
        return x, 1.0 / (1.0 + np.exp(-x @ self.w))

    def ends(self, d: Drafted, batch: int) -> int:
        return first(self.chances(d, batch, len(d.expected))[1] < 0.4)

    def learns(self, d: Drafted, batch: int, came: int, known: int, verified: int, accepted: int) -> None:
        if known:
            x, p = self.chances(d, batch, known)
            gradient = x.T @ (p - (np.arange(known) < came))
            self.squares += gradient**2
            self.w = self.w - 0.1 * gradient / np.sqrt(self.squares + 1e-6)


def first(ends: Any) -> int:
    """How many are False before one is True."""
    return sum(1 for _ in takewhile(lambda end: not end, ends))


def each(cumulative: list[float]) -> list[float]:
    """The chance of each token after those before it."""
    return [b / a if a else 0.0 for a, b in pairwise([1.0, *cumulative])]


def odds(p: float) -> float:
    """Their logarithm, clipped."""
    p = min(max(p, 0.01), 0.99)
    return math.log(p / (1 - p))


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


def _note_solutions(worker: Any) -> None:
    """Note what SmartSpec solves: (chosen length, seconds and acceptance rate of each length, lengths)."""
    engine = bridge(worker).engine
    strategy = engine.tuner.strategy
    choose, engine.noted = strategy.choose, []

    def choosing(bucket: int) -> int:
        b = strategy._buckets[bucket]
        known = [b[n].tolist() for n in ("seconds", "steps")], b["rates"][strategy._group].tolist()
        chosen: int = choose(bucket)
        (seconds, (steps,)), rates = known
        if all(seconds) and steps % 20 == 1:
            ks = strategy._ks.tolist()
            engine.noted.append((ks[chosen], seconds, rates, ks))
        return chosen

    strategy.choose = choosing


def _best_goodput(seconds: list[float], rates: list[float], lengths: list[int]) -> int:
    """The draft length of the most expected tokens per second by SmartSpec's formula; none counts 1.1 times."""
    found = {}
    for t, rate, k in zip(seconds, rates, lengths, strict=True):
        found[k] = sum(rate**i for i in range(int(k) + 1)) / t * (1.0 if k else 1.1)
    return max(found, key=lambda k: found[k])
