"""Which noise a request gets: repeatable where it should be, shared nowhere."""

from __future__ import annotations

import logging

import pytest

from rollspec.proposal.base import Turn
from rollspec.sampling import streams
from rollspec.sampling.streams import Origin, SampleIndex, Streams

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


def test_the_order_of_beginning_does_not_matter_where_the_sample_index_is_known() -> None:
    """Siblings whose grammars become ready in another order; the numbers go on over versions."""
    orders = [(0, 1, 2), (2, 0, 1)]
    seen = []
    for order in orders:
        s, numbering = Streams(0), SampleIndex()
        keys = []
        for version in range(2):
            s.set_version(version)
            numbers = [numbering.number(A) for _ in range(3)]
            began = {i: s.begin(f"{version}-{i}", A, sample_index=numbers[i]) for i in order}
            keys += [began[i] for i in range(3)]
        assert len(set(keys)) == 6
        seen.append(keys)
    plain = Streams(0)
    assert seen[0] == seen[1] == _round(plain, 0, [A] * 3) + _round(plain, 1, [A] * 3)


def test_one_that_waited_over_a_new_version_shares_no_noise() -> None:
    s = Streams(0)
    keys = [s.begin("1", A, sample_index=1), s.begin("2", A, sample_index=2)]
    s.set_version(1)
    keys += [s.begin("0", A, sample_index=0), s.begin("3", A, sample_index=3), s.begin("4", A, sample_index=4)]
    assert len(set(keys)) == 5


def test_a_sample_index_is_bounded_and_gives_no_number_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MOST_PROMPTS", 2)
    numbering = SampleIndex()
    numbers = [numbering.number([i % 3]) for i in range(30)] + [numbering.number(None) for _ in range(2)]
    given = [(i % 3, n) for i, n in enumerate(numbers[:30])]
    assert len(set(given)) == 30 and numbers[30] != numbers[31] and len(numbering._seen) <= 2


def test_own_seeds_decide_alone_and_repeats_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
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
    s.set_version(1)
    assert not s.keys and not s._seeded


def test_siblings_with_one_seed_are_warned_of_though_they_never_run_together(caplog: pytest.LogCaptureFixture) -> None:
    """As where the engine runs few requests at a time; the same seed under the next policy is no repetition."""
    s = Streams(0, keep=True)
    with caplog.at_level(logging.WARNING, "rollspec"):
        s.begin("a", A, seed=7)
        assert not s.repeated("a")
        s.end("a")
        s.set_version(1)
        s.begin("b", A, seed=7)
        assert not s.repeated("b") and not caplog.records
        s.end("b")
        s.begin("c", A, seed=7)
        assert s.repeated("c") and len(caplog.records) == 1
        s.begin("other", B, seed=7)
        assert not s.repeated("other")
    s.set_version(2)  # "c" still runs, and is not alone for long
    assert not s.repeated("c")
    s.begin("d", A, seed=7)
    assert s.repeated("c") and s.repeated("d")


def test_own_seeds_are_remembered_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MOST_PROMPTS", 3)
    s = Streams(0)
    s.begin("runs", A, seed=0)
    for i in range(20):
        s.begin(str(i), A, seed=1 + i)
        s.end(str(i))
        assert len(s._seeded) <= 3
    s.begin("again", A, seed=0)
    assert s.repeated("again"), "running requests are never forgotten"


def test_counting_is_bounded_and_never_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MOST_PROMPTS", 3)
    s = Streams(0)
    keys = _round(s, 0, [[i % 7] for i in range(50)])
    assert len(set(keys)) == 50 and len(s._seen) <= 3


@pytest.mark.parametrize("keep", [False, True])
def test_a_request_submitted_again_keeps_its_noise_and_its_siblings_their_numbers(keep: bool) -> None:
    """One is aborted before it says anything, one after two tokens, over a new version; then a sibling comes."""
    undisturbed, numbering = Streams(0, keep=keep), SampleIndex()
    expected = [undisturbed.begin(str(i), A, sample_index=numbering.number(A)) for i in range(3)]
    undisturbed.set_version(1)
    later = undisturbed.begin("later", A, sample_index=numbering.number(A))

    s, numbering = Streams(0, keep=keep), SampleIndex()
    origins = [Origin(name, len(A)) for name in "ab"]

    def submit(request: str, said: list[int], origin: Origin | None) -> int:
        prompt = [*A, *said]
        return s.begin(request, prompt, sample_index=numbering.number(prompt, origin), origin=origin)

    keys = [submit("a", [], origins[0]), submit("b", [], origins[1])]
    s.end("a"), s.end("b")
    numbering.number(A, third := Origin("c", len(A)))  # aborted before it began
    assert [submit("a2", [], origins[0]), submit("b2", [8, 9], origins[1]), submit("c", [], third)] == [
        *keys, expected[2],
    ]  # fmt: skip
    assert keys == expected[:2]
    s.end("b2")
    s.set_version(1)
    assert submit("b3", [8, 9, 7], origins[1]) == expected[1]
    assert submit("later", [], None) == later and submit("longer", [8, 9], None) not in expected


def test_in_another_engine_it_has_other_noise_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    there, here = Streams(0, (0,)), Streams(0, (1,))
    key = there.begin("a", A, origin=Origin("a", 3))
    with caplog.at_level(logging.WARNING, "rollspec"):
        moved = [here.begin(name, [*A, 8], origin=Origin(name, 3)) for name in "ab"]
    assert len({key, *moved, here.begin("new", A)}) == 4
    assert here.begin("a2", [*A, 8, 9], origin=Origin("a", 3)) == moved[0], "from then on it is this engine's"
    assert len(caplog.records) == 1 and "aborted in another engine" in caplog.text
    # A seed of its own, and its prompt, are known to any engine.
    keys = {e.begin("s", p, seed=5, origin=Origin("s", 3)) for e, p in ((there, A), (here, [*A, 8]))}
    assert len(keys) == 1 and len(caplog.records) == 1


def test_only_the_latest_submissions_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MOST_ORIGINS", 2)
    s, numbering = Streams(0), SampleIndex()
    for i in range(5):
        origin = Origin(str(i), 3)
        s.begin(str(i), A, sample_index=numbering.number(A, origin), origin=origin)
    assert len(s._origins) == len(numbering._origins) == 2


def test_prompts_without_tokens_get_noise_too() -> None:
    s = Streams(0)
    assert s.begin("a", None) != s.begin("b", None)


def test_a_later_turn_has_the_noise_of_its_rollout_whatever_was_said_before() -> None:
    """Two siblings, their second turns in the other order and an epoch later after other words; no two share noise."""

    def rollouts(s: Streams, version: int, tool: int, order: tuple[str, str]) -> dict[str, int]:
        s.set_version(version)
        keys = {f"{n}0": s.begin(f"{n}0-{version}", A, turn=Turn(f"{n}{version}", 0, 3, 3)) for n in "ab"}
        for n in order:  # both have said the same: their prompts are equal
            keys[f"{n}1"] = s.begin(f"{n}1-{version}", [*A, 7, tool], turn=Turn(f"{n}{version}", 1, 3, 4))
        return keys

    kept = Streams(0, keep=True)
    once, again = rollouts(kept, 0, 8, ("a", "b")), rollouts(kept, 1, 9, ("b", "a"))
    assert once == again and len(set(once.values())) == 4
    fresh = Streams(0)
    flat = [k for v, order in ((0, ("a", "b")), (1, ("b", "a"))) for k in rollouts(fresh, v, 8, order).values()]
    assert len(set(flat)) == 8


def test_a_turn_keeps_its_noise_over_aborts_and_seeds_that_repeat_show() -> None:
    s = Streams(0, keep=True)
    for n in "ab":
        s.begin(n, A, seed=5, turn=Turn(n, 0, 3, 3))
    second = Turn("a", 1, 3, 4)
    key = s.begin("a1", [*A, 7, 8], seed=5, origin=Origin("o", 5), turn=second)
    s.end("a1")
    assert s.begin("a2", [*A, 7, 8, 9], seed=5, origin=Origin("o", 5), turn=second) == key
    assert not s.repeated("a2")
    s.begin("b1", [*A, 7, 8], seed=5, turn=Turn("b", 1, 3, 4))
    assert s.repeated("a2") and s.repeated("b1")


def test_a_turn_whose_rollout_began_elsewhere_has_noise_of_its_own_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    s = Streams(0)
    with caplog.at_level(logging.WARNING, "rollspec"):
        keys = {s.begin(n, [*A, 7, 8], turn=Turn(n, 1, 3, 4)) for n in "ab"}
    assert len(keys) == 2 and len(caplog.records) == 1 and "began in another engine" in caplog.text
