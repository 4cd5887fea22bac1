"""Lenient reuse without an engine: what is scored, where it is cut, what is refused, and what is counted."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import numpy as np
import pytest
from installed import needs_vllm
from vllm_like import like

from rollspec.config import ReuseConfig
from rollspec.proposal.base import prompt_key
from rollspec.sampling import scoring
from rollspec.sampling.lenient_reuse import LenientReuse, Prefix, old_responses
from rollspec.telemetry.engine_stats import EngineStats
from rollspec.telemetry.metrics import find, to_metrics

pytestmark = needs_vllm

PROMPT = [5, 6, 7]
EOS = 1
OLD = [10, 11, 12, 13, EOS]
SAMPLED = np.full(5, -1.0, np.float32)


class Engine:
    """Scores every request with `logprobs`, cut or repeated to the length asked for."""

    def __init__(self, logprobs: Any = SAMPLED) -> None:
        self.logprobs, self.asked, self.aborts = logprobs, [], False

    async def __call__(self, prompt: list[int], params: Any) -> Any:
        self.asked.append((prompt, params))
        if self.aborts:
            return None
        values = [0.0] * len(PROMPT) + list(self.logprobs)
        found = [{t: like("vllm.logprobs:Logprob", logprob=v)} for t, v in zip(prompt, values, strict=False)]
        return like(
            "vllm.outputs:RequestOutput", prompt_token_ids=prompt, prompt_logprobs=[None, *found[1:]], finished=True
        )


def reuse(bias: float = 0.0, old: Any = OLD, seed: int = 0, **changes: Any) -> LenientReuse:
    settings: dict[str, Any] = {"max_model_len": 64, "vocab_size": 20, "eos": frozenset({EOS}), **changes}
    out = LenientReuse(
        ReuseConfig(mode="lenient", bias=bias), old_responses(1 << 20), rng=np.random.default_rng(seed), **settings
    )
    out.remember([(prompt_key(PROMPT), "0_0", old, np.full(len(old), -1.0))], 1)
    return out


def prefix(
    r: LenientReuse, engine: Engine, limit: int = 20, sample: str | None = "0_0", **params: Any
) -> Prefix | None:
    return asyncio.run(r.prefix(engine, PROMPT, {"temperature": 0.7, **params}, limit, sample))


def test_an_unchanged_policy_takes_the_old_response_whole() -> None:
    r, engine = reuse(), Engine()
    found = prefix(r, engine)
    assert found == Prefix(OLD, [-1.0] * 5, finished=True)
    ((asked, params),) = engine.asked
    assert asked == PROMPT + OLD and params.prompt_logprobs == 0 and params.max_tokens == 1
    assert scoring.asked(params) == {scoring.TEMPERATURE: 0.7}


def test_it_is_cut_at_the_first_rejection_and_has_the_present_log_probs() -> None:
    now = np.array([-0.5, -1.0, -60.0, -0.1, -0.1])
    found = prefix(reuse(), Engine(now))
    assert found == Prefix(OLD[:2], [-0.5, -1.0], finished=False)
    assert prefix(reuse(bias=80.0), Engine(now)) == Prefix(OLD, [float(np.float32(x)) for x in now], finished=True)
    found = prefix(reuse(bias=80.0), Engine([-1.0, float("nan"), -1.0, -1.0, -1.0]))
    assert found is not None and found.tokens == OLD[:1], "NaN is never accepted"
    assert prefix(reuse(), Engine([-99.0] * 5)) == Prefix([], [], finished=False)


def test_every_old_token_is_judged_with_fresh_numbers() -> None:
    """At half the old probability half of the first tokens are accepted, and not the same ones each time."""
    r = reuse()
    firsts = [len(prefix(r, Engine(SAMPLED + np.log(0.5))).tokens) > 0 for _ in range(400)]  # type: ignore[union-attr]
    assert 150 < sum(firsts) < 250


def test_where_it_ends() -> None:
    open_end = [10, 11, 12, 13, 14]
    found = prefix(reuse(old=open_end), Engine())
    assert found == Prefix(open_end, [-1.0] * 5, finished=False), "cut by a limit that is higher now: goes on"
    found = prefix(reuse(old=open_end), Engine(), limit=5)
    assert found is not None and found.finished, "at the limit"
    found = prefix(reuse(), Engine(), stop_token_ids=[12])
    assert found == Prefix(OLD[:3], [-1.0] * 3, finished=True), "a stop token that was none then"
    found = prefix(reuse(), Engine(), ignore_eos=True)
    assert found is not None and not found.finished
    engine = Engine()
    found = prefix(reuse(max_model_len=3 + 3 + 1), engine)
    assert found == Prefix(OLD[:3], [-1.0] * 3, finished=False) and len(engine.asked[0][0]) == 6, "what fits is scored"


@pytest.mark.parametrize(
    ("params", "cause", "said"),
    [
        ({"temperature": 0.0}, "temperature 0", "greedy"),
        ({"top_p": 0.9}, "top_p", "top_p = 0.9"),
        ({"top_k": 5}, "top_k", "top_k = 5"),
        ({"repetition_penalty": 1.1}, "repetition_penalty", "1.1"),
        ({"stop": ["x"]}, "stop", "stop is set"),
        ({"seed": 0}, "seed", "seed is set"),
        ({"logits_processors": [print]}, "logits_processors", "logits_processors is set"),
        ({"limit": 4}, "longer than the limit", "it has 5 tokens and the rollout may have 4"),
    ],
)
def test_what_cannot_be_done_exactly_as_described_is_refused_once(
    params: dict[str, Any], cause: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    r, engine = reuse(), Engine()
    with caplog.at_level(logging.WARNING, "rollspec"):
        assert prefix(r, engine, **params) is None and prefix(r, engine, **params) is None
    assert engine.asked == [] and len(caplog.records) == 1
    text = caplog.records[0].getMessage()
    assert said in text and text.startswith("rollspec: ") and "\n" not in text
    assert r.drain() == {"requests": 2, f"refused/{cause}": 2}
    assert prefix(r, engine) is not None, "the next one is reused again"


def test_neutral_parameters_are_no_reason() -> None:
    params = {"top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True, "stop": None, "min_p": 0}
    assert prefix(reuse(), Engine(), **params) is not None


def test_responses_that_do_not_fit_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    r = reuse(old=[10, 99])
    assert prefix(r, Engine()) is None
    assert "it has token 99 and the vocabulary ends at 19" in caplog.text
    assert r.remember([("k", "0_0", [1, 2], [-1.0])], 1)["kept"] == 0
    assert "as many finite log-probs" in caplog.text
    raw = reuse(logprobs_mode="raw_logprobs")
    assert prefix(raw, Engine()) is None and prefix(raw, Engine(), temperature=1.0) is not None


def test_without_an_old_response_or_a_sample_number_nothing_is_asked() -> None:
    r, engine = reuse(), Engine()
    assert prefix(r, engine, sample="7_0") is None and prefix(r, engine, sample=None) is None
    assert engine.asked == [] and r.drain() == {"requests": 1}


def test_a_policy_that_changes_in_between_is_not_mixed_with_the_old_one(caplog: pytest.LogCaptureFixture) -> None:
    r, engine = reuse(), Engine()

    async def sync(prompt: list[int], params: Any) -> Any:
        r.version = 2
        return await engine(prompt, params)

    assert asyncio.run(r.prefix(sync, PROMPT, {}, 20, "0_0")) is None
    engine.aborts = True
    assert prefix(r, engine) is None
    assert r.drain()["refused/interrupted"] == 2


def test_counts_become_the_papers_metrics() -> None:
    r = reuse()
    prefix(r, Engine())  # whole
    prefix(r, Engine([-1.0, -1.0, -99.0, -1.0, -1.0]))  # cut after two
    prefix(r, Engine(), sample="9_0")  # nothing old
    prefix(r, Engine(), temperature=0.0)
    counts = EngineStats.from_dict(EngineStats(lenient=r.drain()).to_dict())
    merged = EngineStats.merge([counts, counts])
    found = {n: v for n, v in to_metrics(merged).items() if n.startswith("rollspec/reuse/")}
    assert found == {
        "rollspec/reuse/lossy": 1.0,
        "rollspec/reuse/refused/temperature 0": 2,
        "rollspec/reuse/verified": 4,
        "rollspec/reuse/skip_ratio": 0.25,
        "rollspec/reuse/cont_ratio": 0.75,
        "rollspec/reuse/avg_cut_idx": 7 / 4,
        "rollspec/reuse/avg_saved_tokens": 7 / 4,
        "rollspec/reuse/avg_resp_len": 10 / 4,
    }
    assert all(find(name) is not None for name in found)
    assert not [n for n in to_metrics(EngineStats()) if n.startswith("rollspec/reuse/")], "off: nothing is claimed"


def test_the_warning_at_start_says_lossy() -> None:
    from rollspec.sampling.lenient_reuse import warning

    text = warning(ReuseConfig(mode="lenient", bias=0.5))
    assert text.startswith("LOSSY") and "bias 0.5" in text
