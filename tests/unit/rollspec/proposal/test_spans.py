"""Responses that several policy versions sampled: every token is its version's, none is lost, none is kept twice."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from vllm_like import like

from rollspec import RollspecConfig
from rollspec.errors import HistoryError
from rollspec.proposal.base import as_tokens, prompt_key
from rollspec.proposal.history import History, Response, extend_spans
from rollspec.step import DraftEngine

PROMPTS = [[1, 2, 3 + i] for i in range(25)]
LENGTH = 40


def make(**overrides: Any) -> DraftEngine:
    return DraftEngine(RollspecConfig.load("default", overrides=overrides, env={}), 4096)


def text_of(version: int, prompt: int, at: int) -> int:
    """What a policy says there; it is seen from a token which policy said it."""
    return 1000 * version + 100 + (17 * prompt + at) % 800


def by_marker(tokens: list[int]) -> list[int]:
    return [(t - 100) // 1000 for t in tokens]


def test_spans_go_on_from_where_they_are_cut() -> None:
    assert extend_spans((), 0, 3) == ((0, 3),)
    assert extend_spans(((0, 3),), 5, 3) == ((0, 3),)
    assert extend_spans(((0, 3), (5, 4)), 5, 6) == ((0, 3), (5, 6))
    assert extend_spans(((0, 3), (5, 4)), 2, 3) == ((0, 3),)
    assert Response(as_tokens([7, 7, 7]), 2).versions().tolist() == [2, 2, 2]
    assert Response(as_tokens([7, 7, 7]), 2, spans=((0, 2), (1, 5))).versions().tolist() == [2, 5, 5]


def spans_of(tokens: list[int]) -> list[list[int]]:
    versions = by_marker(tokens)
    return [[i, v] for i, v in enumerate(versions) if i == 0 or versions[i - 1] != v]


@pytest.mark.parametrize("known", ["by the rollout", "by history"])
@pytest.mark.parametrize("sources", [["siblings", "past", "global"], ["past", "global"], ["siblings"]])
def test_200_responses_aborted_over_10_syncs(known: str, sources: list[str], tmp_path: Path) -> None:
    """Some are aborted with tokens that do not come back, some run through a sync without an abort, and the tokens of
    some are dropped and sampled again.
    """
    rng = random.Random(5)
    p = make(**{"proposal.suffix.sources": sources, "proposal.suffix.window": 16})
    said: dict[str, list[int]] = {f"{i}-{j}": [] for i in range(len(PROMPTS)) for j in range(8)}
    running: dict[str, str] = {}
    done: set[str] = set()
    aborts = 0

    def submit(name: str) -> None:
        running[name] = f"{name}/{rng.random()}"
        p.begin(
            running[name], PROMPTS[int(name.split("-")[0])], LENGTH, emitted=said[name], origin=name,
            spans=spans_of(said[name]) if known == "by the rollout" else (),
        )  # fmt: skip

    def step(version: int) -> None:
        names = list(running)
        new = [
            [text_of(version, int(n.split("-")[0]), len(said[n]) + at) for at in range(rng.randrange(1, 4))]
            for n in names
        ]
        p.step([running[n] for n in names], new, {})
        for n in names:
            said[n] = list(p.requests[running[n]].output)
            if p.requests[running[n]].ended:
                p.finish(running.pop(n))
                done.add(n)

    for name in said:
        submit(name)
    for version in range(11):
        p.set_version(version)
        for name in [n for n in said if n not in done and n not in running]:
            submit(name)
        for _ in range(2):
            step(version)
        for name in list(running):
            kind, request = rng.randrange(4), p.requests[running[name]]
            if kind == 0:  # goes on over the sync
                continue
            if kind == 1 and "siblings" not in sources:  # preempted: the last tokens are sampled again
                request.drop(max(0, len(said[name]) - 2), version)
                said[name] = list(request.output)
                continue
            aborts += 1
            back = len(said[name]) - rng.randrange(3)  # the engine may be ahead of what came back
            p.finish(running.pop(name))
            said[name] = said[name][: max(0, back)]
    while running or len(done) < len(said):
        for name in [n for n in said if n not in done and n not in running]:
            submit(name)
        step(10)
    assert aborts > 400

    p.history.save(tmp_path)
    loaded = History(1 << 30, 16)
    loaded.load(tmp_path, version=11)
    for h in (p.history, loaded):
        kept = {key: [r.tokens.tolist() for r in entry.responses] for key, entry in h}
        for i, prompt in enumerate(PROMPTS):
            expected = sorted(said[f"{i}-{j}"] for j in range(8))
            assert sorted(kept[prompt_key(prompt)]) == expected, "lost or doubled"
        for _, entry in h:
            for r in entry.responses:
                assert r.versions().tolist() == by_marker(r.tokens.tolist())
                assert r.version == by_marker(r.tokens.tolist())[0]
    everything = sorted(t for tokens in said.values() for t in tokens)
    if "global" in sources:
        assert sorted(t for t in p.suffix._global.tokens.tolist() if t >= 100) == everything
    texts = [t for group in p.suffix._groups.values() for t in group.corpus.tokens.tolist() if t >= 100]
    assert sorted(texts) == everything
    assert all(group.ended == {0: [LENGTH] * 8} for group in p.suffix._groups.values())


def test_what_an_aborted_part_said_drafts_for_its_siblings_and_for_what_goes_on() -> None:
    p = make(**{"tuning.strategy": "static", "tuning.guard.enabled": False, "proposal.budget.rule": "fixed"})
    text = [100 + i for i in range(30)]
    p.begin("a", [1, 2], 99, origin="x")
    p.step(["a"], [text], {})
    p.finish("a")
    p.set_version(1)
    p.begin("b", [1, 2], 99)
    ((first, *_),) = p.step(["b"], [text[:3]], {})
    assert first == text[3]
    p.finish("b")
    p.begin("c", [1, 2], 99, emitted=text, origin="x")
    ((first, *_),) = p.step(["c"], [text[:3]], {})
    assert first == text[3], "from its own part"


def test_a_tree_that_is_built_from_history_holds_a_part_once() -> None:
    p = make()
    p.begin("a", [1, 2], 99, origin="x")
    p.step(["a"], [[500, 501, 502]], {})
    p.finish("a")
    p.suffix._groups.clear()  # as under memory pressure
    p.begin("b", [1, 2], 99, emitted=[500, 501], origin="x")
    (group,) = p.suffix._groups.values()
    assert group.corpus.tokens.tolist().count(500) == 1


def test_what_is_saved_in_mid_rollout_holds_a_part_once(tmp_path: Path) -> None:
    p = make()
    p.begin("a", [1, 2], 99, origin="x")
    p.step(["a"], [[500, 501]], {})
    p.finish("a")
    p.set_version(1)
    p.begin("b", [1, 2], 99, emitted=[500], origin="x")
    p.step(["b"], [[600]], {})
    p.history.save(tmp_path, p.snapshot())
    h = History(1 << 20, 4)
    assert h.load(tmp_path, version=2) == 1
    (response,) = h.get(prompt_key([1, 2])).responses  # type: ignore[union-attr]
    assert response.tokens.tolist() == [500, 600] and response.spans == ((0, 0), (1, 1))


def test_a_rollout_that_is_moved_brings_its_versions() -> None:
    p = make()
    p.set_version(7)
    p.begin("a", [1, 2], 99, emitted=[500, 501, 502], origin="x", spans=[[0, 3], [2, 5]])
    p.step(["a"], [[503]], {})
    p.finish("a")
    (response,) = p.history.get(prompt_key([1, 2])).responses  # type: ignore[union-attr]
    assert response.versions().tolist() == [3, 3, 5, 7] and response.version == 3


def test_spans_of_a_request_are_used_only_where_they_are_whole() -> None:
    from rollspec.sampling import scoring

    def read(given: Any) -> Any:
        return scoring.spans(like("vllm:SamplingParams", extra_args={"rollspec": {"spans": given}}))

    assert read([[0, 3], [4, 5]]) == ((0, 3), (4, 5))
    for wrong in (None, 7, "x", [[1, 3]], [[0, 3], [0, 4]], [[0, 3], [5, 4], [2, 5]], [[0]], [["a", 1]]):
        assert read(wrong) == ()


def test_a_file_without_spans_is_read_and_wrong_spans_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    h = History(1 << 20, 4)
    h.add("p", as_tokens([1, 2]), Response(as_tokens([5, 6, 7]), 3, spans=((0, 3), (2, 4))))
    snapshot = h.snapshot()
    del snapshot["prompts"][0]["spans"]  # as before there were any
    h.save(tmp_path, snapshot)
    old = History(1 << 20, 4)
    assert old.load(tmp_path, version=9) == 1
    assert old.get("p").responses[0].versions().tolist() == [3, 3, 3]  # type: ignore[union-attr]
    for wrong in ([[1, 3]], [[0, 3], [0, 4]], [[0, 3], [3, 4]], [[0, "x"]]):
        snapshot = h.snapshot()
        snapshot["prompts"][0]["spans"] = [wrong]
        h.save(tmp_path, snapshot)
        with pytest.raises(HistoryError, match=r"^rollspec: .* is refused .*history starts empty\.$"):
            old.load(tmp_path, version=9)


def test_versions_of_another_job_are_shifted_with_their_spans(tmp_path: Path) -> None:
    h = History(1 << 20, 4)
    h.add("p", as_tokens([1, 2]), Response(as_tokens([5, 6, 7]), 50, spans=((0, 50), (2, 51))))
    h.save(tmp_path)
    fresh = History(1 << 20, 4)
    fresh.load(tmp_path, version=0)
    (response,) = fresh.get("p").responses  # type: ignore[union-attr]
    assert response.versions().tolist() == [-2, -2, -1]
