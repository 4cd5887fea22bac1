"""Lossy reuse on a real engine, through the code that verl's server runs: scoring, cut, continuation, distribution."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lenient import (
    LIMIT,
    PAST,
    PRESENT,
    PROMPTS,
    Run,
    audit,
    counts,
    event_loop,
    make_server,
    remember,
    rollouts,
    started,
)
from models import make_sharp_model

from benchmarks.lenient_distance import distribution, total_variation
from rollspec.audit.reference import Reference
from rollspec.audit.statistics import g_test, merge_rare
from rollspec.proposal.base import prompt_key
from rollspec.sampling import scoring

pytest.importorskip("verl")
pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def sharp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sharp_model(tmp_path_factory.mktemp("sharp"))


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with event_loop() as found:
        yield found


@pytest.fixture(scope="module")
def engine(sharp: Path, run: Run) -> Iterator[Any]:
    with started(sharp, {"preset": "default", "reuse": {"mode": "lenient"}}, run) as found:
        yield found


@pytest.fixture
def server(engine: Any, run: Run) -> Any:
    return run(make_server(engine, reusing()))


def reusing(bias: float = 0.0) -> dict[str, Any]:
    """Settings of the server."""
    return {"preset": "spec_rl", "reuse": {"mode": "lenient", "bias": bias}}


def test_under_an_unchanged_policy_old_responses_are_taken_whole(sharp: Path, server: Any, run: Run) -> None:
    """Ratio 1 at every token: what is scored is what was sampled, at this temperature and batch, to rounding."""
    first = run(rollouts(server, PRESENT, 8, "first"))
    assert counts(run(server.rollspec_call("stats", {}))) == {"rollspec/reuse/lossy": 0.0}
    remember(server, first)
    again = run(rollouts(server, PRESENT, 8, "again"))
    stats = run(server.rollspec_call("stats", {}))
    found = counts(stats)
    assert found["rollspec/reuse/verified"] == 48 and found["rollspec/reuse/skip_ratio"] > 0.95
    same = [a[2].token_ids == b[2].token_ids for a, b in zip(first, again, strict=True)]
    assert sum(same) >= 46
    for (_, _, a), (_, _, b) in zip(first, again, strict=True):
        if a.token_ids == b.token_ids:
            assert np.abs(np.array(a.log_probs) - np.array(b.log_probs)).max() < 2e-4
    assert stats["prompts"] == len(PROMPTS), "neither scored prompts nor prefixes are prompts of their own"


def test_a_large_bias_takes_everything_and_a_lower_ratio_cuts(sharp: Path, engine: Any, run: Run) -> None:
    server = run(make_server(engine, reusing(50.0)))
    first = run(rollouts(server, PRESENT, 4, "one"))
    run(server.rollspec_call("stats", {}))
    remember(server, first, shift=2.0)
    again = run(rollouts(server, PRESENT, 4, "two"))
    assert counts(run(server.rollspec_call("stats", {})))["rollspec/reuse/skip_ratio"] == 1.0
    assert [o.token_ids for *_, o in again] == [o.token_ids for *_, o in first]

    server = run(make_server(engine, reusing()))
    remember(server, first, shift=0.2)  # as if each token had been e^0.2 times as likely: kept with chance e^-0.2
    cut = run(rollouts(server, PRESENT, 4, "three"))
    found = counts(run(server.rollspec_call("stats", {})))
    kept = found["rollspec/reuse/avg_cut_idx"]
    assert 1.5 < kept < 8.0, "4.5 on average, of responses that are long enough"
    assert 0 <= found["rollspec/reuse/skip_ratio"] < 0.5
    for _, _, o in cut:
        assert len(o.token_ids) == len(o.log_probs) <= LIMIT
    # Every log-prob, of prefix and continuation, is the present policy's: an independent model in float32 agrees.
    result = audit(sharp, cut, PRESENT)
    assert result.log_probs is not None and not result.log_probs.failure, result.log_probs


@pytest.mark.slow  # `test_a_lossy_redraw_fails` is its shorter sibling
def test_the_audit_finds_that_the_distribution_is_not_the_policys(sharp: Path, engine: Any, run: Run) -> None:
    """Old responses of another policy: lossy at bias 0. Without them the same server passes."""
    server = run(make_server(engine, reusing()))
    fresh = run(rollouts(server, PRESENT, 80, "fresh"))
    verdict = audit(sharp, fresh, PRESENT)
    assert verdict.verdict == "pass", verdict.reasons
    remember(server, run(rollouts(server, PAST, 80, "past")))
    reused = run(rollouts(server, PRESENT, 80, "reused"))
    verdict = audit(sharp, reused, PRESENT)
    assert verdict.verdict == "fail" and verdict.min_p < 1e-6
    assert verdict.log_probs is not None and not verdict.log_probs.failure, "nothing but the tokens can show it"


def test_the_distribution_is_the_published_one(sharp: Path, engine: Any, run: Run) -> None:
    """2,000 first tokens: distributed as the rule says they are, and as far from the policy."""
    n, bias = 2000, 0.0
    server = run(make_server(engine, reusing(bias)))
    logits = first_logits(sharp).double()
    p, q = ((logits / t).softmax(-1).numpy() for t in (PRESENT, PAST))
    rng = np.random.default_rng(0)
    old = rng.choice(len(q), n, p=q / q.sum())
    items = [(prompt_key(PROMPTS[0]), f"{c}_0", [t], [np.log(q[t])]) for c, t in enumerate(old)]
    server.rollspec_reuse.remember(items, 0)

    async def one(c: int) -> int:
        params = {"temperature": PRESENT, "max_tokens": 1, "extra_args": {scoring.KEY: {"sample": f"{c}_0"}}}
        out = await server.generate(list(PROMPTS[0]), params, request_id=f"distribution-{c}")
        (token,) = out.token_ids
        assert abs(out.log_probs[0] - np.log(p[token])) < 1e-3
        return int(token)

    async def everyone() -> list[int]:
        return await asyncio.gather(*map(one, range(n)))

    observed = np.bincount(run(everyone()), minlength=len(p))
    expected = distribution(p, q, bias)
    for probabilities, agrees in ((expected, True), (p, False)):
        cells = merge_rare(probabilities, n)
        merged = np.bincount(cells, weights=probabilities)
        *_, p_value = g_test(np.bincount(cells, weights=observed, minlength=len(merged)), merged / merged.sum())
        assert (p_value > 1e-3) if agrees else (p_value < 1e-6), (agrees, p_value)
    theory = float(total_variation(p, q, bias))
    assert theory > 0.1 and abs(0.5 * np.abs(observed / n - p).sum() - theory) < 0.04


def first_logits(sharp: Path) -> Any:
    return Reference(sharp, 1.0)._logits(PROMPTS[0], [[0]])[0, 0]
