"""Rules that end the draft of one request: EESD's draws, BanditSpec's bandit of a prompt, DISCO's regressor, TETRIS."""

from __future__ import annotations

import random

import numpy as np
import pytest

from rollspec import RollspecConfig
from rollspec.drafting import stopping
from rollspec.drafting.requests import Proposal, Request
from rollspec.drafting.stopping import RULES, Disco, EXP3SpecPerPrompt, UCBSpecPerPrompt
from rollspec.proposal.base import Draft, as_tokens
from rollspec.proposal.budget import likeliest
from rollspec.step import DraftEngine

LENGTHS = (0, 1, 2, 4, 8)


def request(name: str = "r") -> Request:
    return Request(name, "key", as_tokens([1]), 0, 99)


def proposal(probs: list[float], source: str = "suffix") -> Proposal:
    chain = np.cumprod(probs).tolist()
    return Proposal(Draft([7] * len(probs), chain, source, 2), [0] * len(probs), chain)


# ---- SVIP and SpecDec++


def test_unsure_drafts_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    svip, specdec, r = RULES["svip"](LENGTHS), RULES["specdec++"](LENGTHS), request()
    p = proposal([0.99, 0.97, 0.6, 0.99])
    assert svip.keep(r, p, 1) == 2  # sqrt of 0.67 nats at 0.6
    assert svip.keep(r, proposal([0.3]), 1) == 0, "an unlikely choice is unsure"
    assert specdec.keep(r, p, 1) == 4 and specdec.keep(r, proposal([]), 1) == 0
    monkeypatch.setattr(stopping, "SVIP_BOUND", 0.9)
    monkeypatch.setattr(stopping, "SPECDEC_RISK", 0.3)
    assert svip.keep(r, p, 1) == 4 and specdec.keep(r, p, 1) == 2


# ---- EESD


def test_eesd_decides_after_every_token_by_a_draw_of_what_was_accepted() -> None:
    """With θ known, a draft's length is geometric: 1 + θ + θ² + ... up to its eight tokens."""
    rule, r, p = RULES["eesd"](LENGTHS), request(), proposal([0.9] * 8)
    for theta in (0.2, 0.8):
        rule.posteriors["suffix"] = [1e6 * theta, 1e6 * (1 - theta)]  # type: ignore[attr-defined]
        kept = [rule.keep(r, p, 1) for _ in range(4000)]
        assert min(kept) == 1 and len(set(kept)) > 4, "tokens decide, not one draw for the step"
        assert np.mean(kept) == pytest.approx((1 - theta**8) / (1 - theta), rel=0.05)


def test_eesd_counts_what_was_verified() -> None:
    rule, r, p = RULES["eesd"](LENGTHS), request(), proposal([0.9] * 4)
    for accepted, verified in ((3, 4), (4, 4), (2, 0)):  # the last one was not handed over
        r.accepted = accepted
        rule.learn(r, p, accepted, accepted, verified, 1)
    assert rule.posteriors == {"suffix": [8.0, 2.0]}  # type: ignore[attr-defined]
    assert RULES["eesd"](LENGTHS).keep(r, proposal([0.9]), 1) == 1


# ---- BanditSpec


def test_a_prompts_bandit_begins_and_ends_with_it() -> None:
    rule, first, second, p = UCBSpecPerPrompt(LENGTHS), request("a"), request("b"), proposal([0.9] * 8)
    seen = []
    for _ in range(4):
        seen.append(rule.keep(first, p, 1))
        first.accepted = 0
        rule.learn(first, p, 0, 1, seen[-1], 1)
    assert seen == [1, 2, 4, 8], "every arm once"
    assert rule.keep(second, p, 1) == 1, "another prompt knows nothing of it"
    rule.finish(first)
    assert set(rule.learners) == {"b"}
    assert rule.keep(first, p, 1) == 1


def test_a_prompts_bandit_is_paid_the_tokens_that_a_verification_emits() -> None:
    rule, r, p = UCBSpecPerPrompt(LENGTHS), request(), proposal([0.9] * 8)
    for accepted in (1, 2, 3, 0):
        n = rule.keep(r, p, 1)
        r.accepted = accepted
        rule.learn(r, p, accepted, accepted, n, 1)
    learner, _ = rule.learners["r"]
    assert learner.state()["buckets"]["0"]["sums"] == [2.0, 3.0, 4.0, 1.0]
    rule.learn(r, p, 5, 5, 0, 1)  # scored, and not verified
    assert learner.state()["buckets"]["0"]["plays"] == [1.0] * 4


def test_exp3spec_of_two_prompts_draws_apart() -> None:
    rule, p = EXP3SpecPerPrompt(LENGTHS), proposal([0.9] * 8)
    kept = {name: [rule.keep(request(name), p, 1) for _ in range(30)] for name in ("a", "b")}
    assert kept["a"] != kept["b"] and set(kept["a"]) == {1, 2, 4, 8}


# ---- DISCO


def test_disco_learns_where_a_drafter_is_wrong_that_its_calibration_does_not_know() -> None:
    """Calibrated at 0.7 everywhere, and always rejected from the third token on."""
    rule, r, p = Disco(LENGTHS), request(), proposal([0.7] * 8)
    assert rule.keep(r, p, 4) == 8, "at first it is the calibration's"
    rng = random.Random(0)
    for _ in range(400):
        accepted = 0
        while accepted < 2 and rng.random() < 0.95:
            accepted += 1
        rule.learn(r, p, accepted, accepted + 1, 0, 4)
    assert rule.keep(r, p, 4) == 2


def test_disco_tells_drafters_and_batches_apart() -> None:
    rule, r = Disco(LENGTHS), request()
    memory, head = proposal([0.6] * 4), proposal([0.6] * 4, "eagle3")
    for _ in range(300):
        rule.learn(r, memory, 4, 4, 0, 1)
        rule.learn(r, head, 0, 1, 0, 1)
    assert rule.keep(r, memory, 1) == 4 and rule.keep(r, head, 1) == 0


# ---- TETRIS


def test_tetris_takes_the_likeliest_of_the_whole_batch_up_to_its_capacity() -> None:
    chains = [[0.9, 0.8, 0.7], [0.5, 0.1], [0.95], []]
    assert likeliest(chains, 4) == [3, 0, 1, 0]
    assert likeliest(chains, 99) == [3, 2, 1, 0] and likeliest(chains, 0) == [0, 0, 0, 0]


# ---- in a step


@pytest.mark.parametrize("preset", ["svip", "specdec++", "disco", "eesd", "banditspec", "exp3spec", "tetris"])
def test_a_rule_ends_drafts_in_a_step_and_learns_from_it(preset: str) -> None:
    """Text of which half repeats; without the rule every draft would be as long as the arm."""
    rng = random.Random(1)
    period = [rng.randrange(5, 40) for _ in range(24)]
    p = DraftEngine(RollspecConfig.load(preset, env={}), 4096)
    texts = {f"r{i}": [t if rng.random() < 0.8 else rng.randrange(5, 40) for t in period * 12] for i in range(6)}
    at, drafts, lengths, given = dict.fromkeys(texts, 0), {n: [] for n in texts}, set(), []
    cut: list[tuple[int, int]] = []
    if (rule := p.selection.rule) is not None:
        keep = rule.keep

        def noting(r: Request, draft: Proposal, batch: int) -> int:
            cut.append((keep(r, draft, batch), len(draft.expected)))
            return cut[-1][0]

        rule.keep = noting  # type: ignore[method-assign]
    for name in texts:
        p.begin(name, [1, 2, 3], 400)
    for _ in range(60):
        new = []
        for name, text in texts.items():
            n, draft = 0, drafts[name]
            while n < len(draft) and draft[n] == text[at[name] + n]:
                n += 1
            new.append(text[at[name] : at[name] + n + 1])
            at[name] += n + 1
        out = p.step(list(texts), new, {n: d for n, d in drafts.items() if d}, 0.0)
        drafts = dict(zip(texts, out, strict=True))
        lengths |= {len(d) for d in out}
        given.append(sum(map(len, out)))
        if any(at[n] > 220 for n in texts):
            break
    assert len(lengths - {0}) > 2, lengths
    assert rule is None or any(kept < offered for kept, offered in cut), "no draft was cut"
    if preset == "eesd":
        assert sum(map(sum, rule.posteriors.values())) > 12  # type: ignore[union-attr]
    if preset == "disco":
        assert rule.weights[1] != 1.0 and rule.weights.any()  # type: ignore[union-attr]
    if preset in ("banditspec", "exp3spec"):
        assert set(rule.learners) == set(texts)  # type: ignore[union-attr]
        p.finish("r0")
        assert "r0" not in rule.learners  # type: ignore[union-attr]
    if preset == "tetris":
        assert 0 < max(given) <= 6 * 4 and max(lengths) == 6, "a capacity that the batch shares"
