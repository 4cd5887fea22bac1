"""Which noise a request gets: repeatable where it should be, shared nowhere."""

from __future__ import annotations

import logging

import pytest

from rollspec.sampling import streams
from rollspec.sampling.streams import Streams

A, B = [1, 2, 3], [1, 2, 4]


def _round(s: Streams, version: int, prompts: list[list[int]]) -> list[int]:
    s.set_version(version)
    names = [f"{version}-{i}" for i in range(len(prompts))]
    keys = [s.begin(n, p) for n, p in zip(names, prompts, strict=True)]
    for n in names:
        s.end(n)
    return keys


def test_a_run_repeats_and_nothing_in_it_shares_noise() -> None:
    order = [A, B, A, B, B]
    one, other = Streams(3), Streams(3)
    rounds = [_round(one, v, order) for v in range(3)]
    assert rounds == [_round(other, v, order) for v in range(3)]
    flat = [k for keys in rounds for k in keys]
    assert len(set(flat)) == len(flat)
    # Only the order within a prompt counts, not how prompts are mixed.
    assert sorted(_round(Streams(3), 0, [B, B, A, B, A])) == sorted(rounds[0])
    assert not set(flat) & set(_round(Streams(4), 0, order))
    assert not set(flat) & set(_round(Streams(3, (1,)), 0, order))


def test_kept_seeds_return_with_the_next_version() -> None:
    s = Streams(0, keep=True)
    assert _round(s, 0, [A, A, B]) == _round(s, 5, [A, A, B])
    assert set(_round(s, 6, [A, A])).isdisjoint(_round(s, 6, [A, A])), "the same version again: new samples"


def test_a_request_keeps_its_key_while_it_runs() -> None:
    s = Streams(0)
    key = s.begin("r", A)
    s.set_version(1)
    assert s.begin("r", A) == key  # preempted and resumed
    s.end("r")
    s.end("r")
    assert s.begin("r", A) != key


def test_own_seeds_decide_alone_and_repeats_are_told(caplog: pytest.LogCaptureFixture) -> None:
    s = Streams(0)
    key = s.begin("a", A, seed=7)
    assert Streams(99, (3,)).begin("x", A, seed=7) == key
    assert s.begin("b", B, seed=7) != key
    with caplog.at_level(logging.WARNING, "rollspec"):
        assert s.begin("c", A, seed=7) == key
        s.begin("d", A, seed=7)
    assert len(caplog.records) == 1 and "seed 7" in caplog.text
    for r in "abcd":
        s.end(r)
    assert not s.keys and not s._seeded


def test_counting_is_bounded_and_never_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MOST_PROMPTS", 3)
    s = Streams(0)
    keys = _round(s, 0, [[i % 7] for i in range(50)])
    assert len(set(keys)) == 50 and len(s._seen) <= 3


def test_prompts_without_tokens_get_noise_too() -> None:
    s = Streams(0)
    assert s.begin("a", None) != s.begin("b", None)
