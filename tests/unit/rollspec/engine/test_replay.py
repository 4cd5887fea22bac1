"""Replay of old responses under kept noise: drafts, counts, history, and what is refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from vllm_like import like

from rollspec import RollspecConfig
from rollspec.drafting.requests import Replay
from rollspec.errors import ConfigError, HistoryError
from rollspec.log_once import LogOnce
from rollspec.proposal.base import as_tokens
from rollspec.proposal.history import History, Response
from rollspec.sampling.streams import Streams
from rollspec.telemetry.engine_stats import EngineStats
from rollspec.telemetry.metrics import find, to_metrics

REUSE = {"mode": "coupled", "reuse.mode": "replay"}
STATIC = {"tuning.strategy": "static", "tuning.guard.enabled": False, "proposal.budget.rule": "fixed"}


def test_a_replay_ends_with_the_first_difference() -> None:
    r = Replay([5, 6, 7, 8])
    assert r.draft(2).token_ids == [5, 6]  # type: ignore[union-attr]
    r.advance([5, 6])
    draft = r.draft(9)
    assert draft is not None and (draft.token_ids, draft.source, draft.match_len) == ([7, 8], "replay", 2)
    r.advance([7, 9])
    assert (r.at, r.alive, r.draft(3)) == (3, False, None)
    r.advance([8])
    assert r.at == 3 and not r.identical(5)


def test_a_replay_that_is_over_drafts_nothing() -> None:
    r = Replay([5, 6])
    r.advance([5, 6])
    assert r.draft(4) is None and r.identical(2)
    r.advance([7])
    assert not r.identical(3) and r.at == 2
    shorter = Replay([5, 6])
    shorter.advance([5])
    assert not shorter.identical(1)


def test_history_finds_the_sample_by_its_noise(tmp_path: Path) -> None:
    h = History(1 << 20, 3)
    prompt = as_tokens([1, 2])
    for version in range(3):
        for stream in (1 << 63, 7):
            h.add("p", prompt, Response(as_tokens([version, stream % 11]), version, stream=stream))
    h.add("p", prompt, Response(as_tokens([99]), 1))
    h.save(tmp_path)
    loaded = History(1 << 20, 3)
    assert loaded.load(tmp_path, version=5) == 7
    for found in (h, loaded):
        assert found.previous("p", 7, 2).tolist() == [1, 7]  # type: ignore[union-attr]
        assert found.previous("p", 1 << 63, 9).tolist() == [2, (1 << 63) % 11]  # type: ignore[union-attr]
        assert found.previous("p", 7, 0) is None
        assert found.previous("p", 8, 9) is None and found.previous("q", 7, 9) is None


def test_a_history_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    h = History(1 << 20, 3)
    h.add("p", as_tokens([1, 2]), Response(as_tokens([600]), 0))
    h.save(tmp_path)
    with pytest.raises(HistoryError, match=r"token 600.*ends at 511"):
        History(1 << 20, 3).load(tmp_path, vocab=512)
    assert list(tmp_path.glob("*.corrupt"))


def test_a_history_of_another_tokenizer_is_refused_in_one_sentence(tmp_path: Path) -> None:
    h = History(1 << 20, 3)
    h.add("p", as_tokens([1, 2]), Response(as_tokens([6]), 0))
    h.save(tmp_path, tokenizer="mine")
    assert History(1 << 20, 3).load(tmp_path, tokenizer="mine") == 1
    assert History(1 << 20, 3).load(tmp_path) == 1, "not known here: nothing to compare"
    empty = History(1 << 20, 3)
    with pytest.raises(
        HistoryError, match=r"^rollspec: .*another tokenizer \(mine, not yours\).*history starts empty\.$"
    ):
        empty.load(tmp_path, tokenizer="yours")
    assert empty.load(tmp_path, tokenizer="yours") == 0, "set aside"
    h.save(tmp_path)
    assert empty.load(tmp_path, tokenizer="yours") == 1, "written without a name"


def test_an_old_response_longer_than_the_limit_is_drafted_up_to_it() -> None:
    from rollspec.step import DraftEngine

    p = DraftEngine(RollspecConfig.load("default", overrides=REUSE | STATIC, env={}), 4096)
    old = list(range(10, 90))
    _run(p, 0, old, stream=4)
    p.drain()
    assert _run(p, 1, old[:20], stream=4) <= 3
    stats = p.drain()
    assert stats.reuse == [1, 20, 20, 0] and stats.accepted <= 20


def test_greedy_requests_and_repeated_seeds_reuse_nothing_and_say_so_once(caplog: pytest.LogCaptureFixture) -> None:
    from rollspec.engine.noise_keys import NoiseKeys

    c = NoiseKeys.__new__(NoiseKeys)
    c.on, c.keep, c._log_once, c.streams = True, True, LogOnce(), Streams(0, keep=True)
    sampled, greedy = like("vllm:SamplingParams", temperature=1.0), like("vllm:SamplingParams", temperature=0.0)
    for name, seed in (("a", None), ("b", None), ("c", 5), ("d", 5), ("e", 6)):
        c.streams.begin(name, [1, 2], seed)
    with caplog.at_level(logging.WARNING, "rollspec"):
        keys = [c.stream(name, sampled) for name in "abe"]
        assert None not in keys and len(set(keys)) == 3, "no seed of one's own is no reason"
        for _ in range(2):
            assert c.stream("a", greedy) is None and c.stream("c", sampled) is None and c.stream("d", sampled) is None
    assert [r.getMessage() for r in caplog.records if "old responses" in r.getMessage()] == [
        "rollspec: requests at temperature 0 reuse no old responses, because no noise makes them what they are.",
        "rollspec: requests whose seed another one of their group has reuse no old responses; give each its own.",
    ]
    c.streams.end("d")
    assert c.stream("c", sampled) is None, "it had a sibling with its seed"
    c.streams.set_version(1)
    assert c.stream("c", sampled) == c.streams.keys["c"]
    c.keep = False
    assert c.stream("a", sampled) is None


def _run(p: Any, version: int, text: list[int], stream: int) -> int:
    """Decode one fixed text; the steps it took."""
    p.set_version(version)
    p.begin("r", [1, 2, 3], len(text), stream=stream)
    at, steps, draft = 0, 0, []
    while at < len(text):
        n = 0
        while n < len(draft) and draft[n] == text[at + n]:
            n += 1
        new, at = text[at : at + n + 1], at + n + 1
        (draft,) = p.step(["r"], [new], {"r": draft} if draft else {})
        p.timed(1 + len(draft), True, 0.01, 1)
        steps += 1
    p.finish("r")
    return steps


def test_the_proposer_replays_realigns_and_counts() -> None:
    from rollspec.step import DraftEngine

    p = DraftEngine(RollspecConfig.load("default", overrides=REUSE | STATIC, env={}), 4096)
    old = list(range(10, 90))
    assert _run(p, 0, old, stream=4) == 80
    p.drain()
    assert _run(p, 1, old, stream=4) < 8
    stats = p.drain()
    assert stats.reuse == [1, 80, 80, 1] and stats.correlated and set(stats.by_source) == {"replay"}
    changed = [*old[:30], 5, *old[31:]]
    assert _run(p, 2, changed, stream=4) < 25
    stats = p.drain()
    assert stats.reuse == [1, 80, 30, 0] and {"replay", "group"} <= set(stats.by_source)
    metrics = to_metrics(EngineStats.merge([stats, EngineStats()]))
    assert metrics["rollspec/reuse/share"] == 30 / 80 and metrics["rollspec/reuse/correlated"] == 1.0
    assert all(find(name) for name in metrics)
    assert _run(p, 3, old, stream=5) < 30, "another sample: the suffix drafter drafts, nothing is replayed"
    assert p.drain().reuse == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"reuse.mode": "replay"}, "set mode: coupled as well"),
        ({"reuse.mode": "lenient", "mode": "coupled"}, "lossy, which mode = coupled excludes"),
        ({"mode": "coupled", "reuse.seeds": "keep"}, "unknown key 'reuse.seeds'"),
        (REUSE | {"proposal.drafters": []}, "must not be empty"),
        ({"mode": "lenient"}, "'standard' or 'coupled'"),
        ({"coupled.seed": -1}, "greater than or equal to 0"),
    ],
)
def test_modes_that_contradict_each_other_are_refused(overrides: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        RollspecConfig.load("default", overrides=overrides, env={})
