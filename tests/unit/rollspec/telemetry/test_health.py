"""On-policy health: the maths on cases whose answer is known, and the watch that warns."""

from __future__ import annotations

import logging
import math
import re
import sys
from typing import Any

import numpy as np
import pytest

from rollspec.config import HealthConfig
from rollspec.proposal.base import as_tokens
from rollspec.telemetry.health import PREFIX, HealthWatch, agreement, effective_sample_size, overlap
from rollspec.telemetry.metrics import find

RNG = np.random.default_rng(0)


def logs(*rows: list[float]) -> list[np.ndarray]:
    return [np.log(np.asarray(row)) for row in rows]


def agreed(engine: list[np.ndarray], trainer: list[np.ndarray]) -> dict[str, float]:
    return {name.removeprefix(PREFIX): value for name, value in agreement(engine, trainer).items()}


def repeated(*args: Any) -> dict[str, float]:
    return {name.removeprefix(f"{PREFIX}epoch_"): value for name, value in overlap(*args).items()}


def test_equal_sides_agree_wholly() -> None:
    a = agreed(logs([0.5, 0.25, 0.9], [0.1]), logs([0.5, 0.25, 0.9], [0.1]))
    assert (a["logprob_gap"], a["ratio_outside"], a["ratio_max"], a["logprob_lost"]) == (0.0, 0.0, 1.0, 0)
    assert (a["ess_token"], a["ess_sequence"], a["logprob_corr"]) == pytest.approx((1.0, 1.0, 1.0))


def test_ratios_and_their_effective_sample_sizes() -> None:
    # Token ratios 2, 1/2 | 1, 1: sequences of weight 1 and 1, tokens of weights 2, 1/2, 1, 1.
    a = agreed(logs([0.2, 0.4], [0.3, 0.3]), logs([0.4, 0.2], [0.3, 0.3]))
    assert a["ess_sequence"] == pytest.approx(1.0)
    assert a["ess_token"] == pytest.approx(4.5**2 / (4 * 6.25))
    assert (a["ratio_outside"], a["ratio_max"], a["logprob_gap"]) == pytest.approx((0.5, 2.0, math.log(2) / 2))


def test_the_band_is_wide_inclusive() -> None:
    a = agreed(logs([0.5, 0.5, 0.5, 0.5]), logs([0.41, 0.62, 0.39, 0.63]))
    assert a["ratio_outside"] == 0.5


def test_one_weight_that_is_all_there_is() -> None:
    assert effective_sample_size(np.array([0.0, -800.0, -900.0, -1000.0])) == pytest.approx(0.25)
    assert effective_sample_size(np.array([1e4, 1e4])) == 1.0  # no overflow
    a = agreed([np.full(500, -9.0), np.full(500, -9.0)], [np.full(500, -1.0), np.full(500, -9.0)])
    assert a["ess_sequence"] == 0.5 and a["ratio_max"] == pytest.approx(math.exp(8))


def test_lognormal_weights_have_the_size_that_theory_gives() -> None:
    """Kish's size of exp(sigma Z) tends to exp(-sigma^2)."""
    a = agreed([np.zeros(200_000)], [0.3 * RNG.standard_normal(200_000)])
    assert a["ess_token"] == pytest.approx(math.exp(-0.09), abs=5e-3)


@pytest.mark.parametrize("broken", [math.nan, -math.inf])
def test_what_is_not_finite_shows_and_spoils_nothing_else(broken: float) -> None:
    p, q = logs([0.5, 0.5], [0.4, 0.4], []), logs([0.5, 0.5], [0.4, 0.4], [])
    p[0][1] = broken
    a = agreed(p, q)
    assert not math.isfinite(a["logprob_gap"]) and "logprob_corr" not in a
    assert (a["logprob_lost"], a["ess_token"], a["ess_sequence"], a["ratio_max"]) == (1, 1.0, 1.0, 1.0)
    lost = agreed([np.full(3, math.nan)], [np.zeros(3)])
    assert lost["logprob_lost"] == 3 and "ess_token" not in lost


def test_nothing_to_compare() -> None:
    assert agreement([], []) == {}
    assert agreement(logs([0.5, 0.5]), []) == {}
    assert agreement(logs([0.5, 0.5]), logs([0.5], [0.5])) == {}
    assert overlap([], []) == {}


def test_overlap_counts_prefixes() -> None:
    new = [as_tokens([1, 2, 3]), as_tokens([4]), as_tokens([7, 8]), as_tokens([5, 5, 5, 5])]
    old = [as_tokens([1, 2, 9, 3]), as_tokens([4]), as_tokens([]), as_tokens([5, 5])]
    o = repeated(new, old)
    assert o == {"overlap": 5 / 10, "identical": 1 / 4}


def test_chance_is_what_independent_draws_share() -> None:
    p = np.array([0.6, 0.3, 0.1])
    draws = RNG.choice(3, size=(2, 4000, 5), p=p).astype(np.int32)
    o = repeated(list(draws[0]), list(draws[1]), [np.log(p[row]) for row in draws[0]])
    assert o["overlap"] == pytest.approx(o["overlap_chance"], abs=0.01)  # some 5 standard errors
    same = repeated(list(draws[0]), list(draws[0]), [np.log(p[row]) for row in draws[0]])
    assert same["overlap"] - same["overlap_chance"] > 0.8


def watch(**config: Any) -> HealthWatch:
    return HealthWatch(HealthConfig(**config), 1 << 20)


def test_epochs_are_compared_by_prompt_and_sample() -> None:
    w = watch()
    one, two = as_tokens([1, 2, 3, 4]), as_tokens([5, 6])
    assert w.epochs(["a", "a"], ["0", "1"], [one, two]) == {}
    assert w.epochs(["b"], ["0"], [one]) == {}, "another prompt has no last epoch"
    assert w.epochs(["a", "a"], ["1", "0"], [two, as_tokens([1, 2, 9, 9])]) == {
        "rollspec/health/epoch_overlap": 4 / 6,
        "rollspec/health/epoch_identical": 0.5,
    }
    assert w.epochs(["a"], ["2"], [one]) == {}, "a sample that was not there"
    assert w.epochs(["a"], ["1"], [two]) == {}, "the last time counts, not any time"


def test_a_response_with_tool_output_is_left_out() -> None:
    w = watch()
    for _ in range(2):
        found = w.epochs(["a", "b"], ["0", "0"], [as_tokens([1, 2, 3]), as_tokens([4])], logs([0.5, 0.5], [0.5]))
    assert found["rollspec/health/epoch_identical"] == 1.0 and found["rollspec/health/epoch_overlap_chance"] == 0.5


def test_what_is_remembered_is_bounded() -> None:
    w = HealthWatch(HealthConfig(), 40)
    for key in ("a", "b", "c"):
        w.epochs([key], ["0"], [as_tokens([1, 2, 3, 4])])
    assert w.bytes == 32
    assert w.epochs(["a"], ["0"], [as_tokens([1, 2, 3, 4])]) == {}, "the oldest went"
    assert w.epochs(["c"], ["0"], [as_tokens([1, 2, 3, 4])]) != {}
    w.epochs(["d"], ["0"], [as_tokens(range(100))])
    assert w.bytes == 0


def test_a_warning_is_said_once_and_counted_always(caplog: pytest.LogCaptureFixture) -> None:
    w = watch()
    metrics = agreement([np.zeros(100)], [RNG.standard_normal(100)])
    with caplog.at_level(logging.WARNING, "rollspec"):
        for step in (3, 4):
            found = w.check(metrics, step, {"ratios": ["the temperature is another one"]})
    assert found["rollspec/health/warnings"] == 3.0
    assert {n.rsplit("/", 1)[1] for n in found} == {"warnings", "gap", "ess", "ratios"}
    assert len(caplog.records) == 3
    for record in caplog.records:
        text = record.getMessage()
        assert text.startswith("rollspec: at step 3 ") and "the temperature is another one" in text
        assert re.search(r"\(at (most|least) 0\.\d+ is usual\)", text)
    for name in {**metrics, **found}:
        assert find(name) is not None, name


def test_healthy_rollouts_warn_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    w = watch()
    p = np.log(RNG.uniform(0.1, 1.0, 1000))
    metrics = agreement([p], [p + 0.01 * RNG.standard_normal(1000)])
    assert w.check(metrics, 1, {}) == {"rollspec/health/warnings": 0.0}
    assert w.check({}, 1, {}) == {}, "nothing measured is not the same as no warning"
    assert not caplog.records


def test_repeating_the_last_epoch_is_said_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    w = watch()
    response, p = as_tokens(range(50)), [np.full(50, math.log(0.3))]
    for _ in range(2):
        metrics = w.epochs(["a"], ["0"], [response], p)
    with caplog.at_level(logging.WARNING, "rollspec"):
        found = w.check(metrics, 2, {"overlap": ["reuse.mode = replay"]})
    assert found == {"rollspec/health/warnings": 1.0, "rollspec/health/warnings/overlap": 1.0}
    assert "reuse.mode = replay" in caplog.text and "1.000 of the tokens repeats" in caplog.text
    assert watch(max_overlap=1.0).check(metrics, 2, {}) == {"rollspec/health/warnings": 0.0}


def test_a_nan_is_named(caplog: pytest.LogCaptureFixture) -> None:
    w = watch()
    found = w.check(agreement([np.array([math.nan, 0.0])], [np.zeros(2)]), 1, {})
    assert found == {"rollspec/health/warnings": 1.0, "rollspec/health/warnings/not_finite": 1.0}


def test_work_does_not_grow_in_python_with_the_tokens() -> None:
    """Calls into Python and numpy depend on the number of responses, not on their lengths."""

    def calls(length: int) -> int:
        w = watch()
        p = [np.log(RNG.uniform(0.1, 1.0, length)) for _ in range(8)]
        responses = [as_tokens(RNG.integers(0, 9, length)) for _ in range(8)]
        keys, samples = ["a"] * 8, [str(i) for i in range(8)]
        w.epochs(keys, samples, responses, p)
        count = 0

        def tick(frame: Any, event: str, arg: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(tick)
        try:
            metrics = agreement(p, p) | w.epochs(keys, samples, responses, p)
            w.check(metrics, 1, {})
        finally:
            sys.setprofile(None)
        return count

    calls(10)
    assert calls(10_000) < min(calls(10) + 100, 1000)  # garbage may be collected in either
