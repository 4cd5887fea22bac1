from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_world import simulate, story

from rollspec import RollspecConfig
from rollspec.proposal.base import Turn, as_tokens, prompt_key
from rollspec.step import DraftEngine
from rollspec.telemetry.metrics import to_metrics

pytestmark = pytest.mark.usefixtures("steady_clock")

STATIC = {"tuning.strategy": "static", "tuning.guard.enabled": False}
"""Everything that is proposed is verified, whatever it brings."""


def make(**overrides: Any) -> DraftEngine:
    return DraftEngine(RollspecConfig.load("default", overrides=overrides, env={}), 4096)


def test_second_epoch_is_drafted_from_the_first() -> None:
    p = make()
    texts = {str(i): ([1, 2, i], story(i)) for i in range(4)}
    assert simulate(p, texts) == 120
    p.set_version(1)
    p.drain()
    assert simulate(p, texts) < 30
    s = p.drain()
    assert s.accepted > 0.9 * s.drafted
    assert s.emitted == 4 * 120
    assert s.by_source.keys() == {"group"}


def test_a_response_that_starts_from_an_old_prefix_is_one_response() -> None:
    """Drafts go on where the prefix ends, history holds it whole, and its tokens are not counted as emitted."""
    p = make(**STATIC, **{"proposal.budget.rule": "fixed"})
    prompt, text = [1, 2, 3], story(0)
    simulate(p, {"old": (prompt, text)})
    p.set_version(1)
    p.drain()
    p.begin("new", prompt, len(text), emitted=text[:60])
    ((first, *_),) = p.step(["new"], [[text[60]]], {})
    assert first == text[61], "drafted from the same prompt's old response"
    assert p.drain().emitted == 1
    p.finish("new")
    kept = p.history.get(prompt_key(prompt))
    assert kept is not None and kept.responses[-1].tokens.tolist() == text[:61] and len(p.history) == 1


def test_a_rollout_that_is_aborted_and_goes_on_is_one_response() -> None:
    """Under kept noise: history has it once, what it repeats is the last epoch's, and each token is counted once."""
    p = make(**STATIC, **{"proposal.budget.rule": "fixed"})
    prompt, text = [1, 2, 3], story(0, 40)
    key = prompt_key(prompt)
    p.begin("old", prompt, len(text), stream=7)
    p.step(["old"], [text], {})
    p.finish("old")
    p.set_version(1)
    p.begin("a", prompt, len(text), stream=7, origin="x")
    p.step(["a"], [text[:13]], {})
    p.finish("a")
    assert p.stats.reuse == [1, 13, 13, 0], "the engine was three tokens ahead of what came back"
    p.set_version(2)
    p.begin("b", prompt, len(text), stream=7, emitted=text[:10], origin="x")
    ((first, *_),) = p.step(["b"], [text[10:12]], {})
    assert first == text[12] and p.requests["b"].lookup.draft.source == "replay", "its own part is not what it repeats"
    p.step(["b"], [text[12:]], {})
    p.finish("b")
    assert p.stats.reuse == [1, 40, 40, 1]
    kept = p.history.get(key)
    assert kept is not None and [(r.version, r.tokens.tolist()) for r in kept.responses] == [(0, text), (1, text)]
    assert kept.responses[1].spans == ((0, 1), (10, 2)), "the three tokens that did not come back were sampled again"
    corpus = p.requests.get("b"), p.suffix._groups[key].corpus.tokens.tolist()
    assert corpus[1].count(text[-1]) == 2 and p.suffix._global.tokens.tolist().count(text[-1]) == 2, "not doubled"
    assert len(p.history) == 1 and p.history.evicted == 0 and p.history.bytes == 4 * (3 + 80)
    assert p.history.reward([(key, prompt_key(text), 1.0)]) == 1 and kept.responses[-1].reward == 1.0


def test_slow_siblings_are_drafted_from_fast_ones() -> None:
    p = make()
    text = story(1)
    simulate(p, {"fast": ([1, 2], text)})
    p.drain()
    # The same round, the same prompt: the first sibling has finished.
    assert simulate(p, {"slow": ([1, 2], text)}) < 30
    off = make()
    off.suffix.config = off.suffix.config.model_copy(update={"sources": ()})
    simulate(off, {"fast": ([1, 2], text)})
    assert simulate(off, {"slow": ([1, 2], text)}) == 120


def test_past_rounds_can_be_left_out() -> None:
    p = make(**{"proposal.suffix.sources": ["siblings"]})
    texts = {"a": ([1, 2], story(1))}
    simulate(p, texts)
    p.set_version(1)
    assert simulate(p, texts) == 120


def test_window_slides_in_the_trees() -> None:
    p = make(**{"proposal.suffix.window": 1, "proposal.suffix.sources": ["siblings", "past"]})
    old, new = story(1), story(2)
    for version, text in enumerate((old, new, new)):
        p.set_version(version)
        simulate(p, {f"{version}": ([1, 2], text)})
    p.set_version(3)
    p.drain()
    assert simulate(p, {"x": ([1, 2], old)}) == 120, "text of a round outside the window was drafted"


def test_the_global_corpus_serves_other_prompts() -> None:
    p = make()
    text = story(3)
    simulate(p, {"a": ([1, 2], text)})
    p.drain()
    assert simulate(p, {"b": ([7, 8, 9], text)}) < 40
    assert "global" in p.drain().by_source


def test_useless_drafts_are_not_verified() -> None:
    """Text that never repeats, over few symbols so that suffixes always match: the budget learns to verify little."""
    rng = random.Random(0)
    texts = {str(i): ([1, i], [rng.randrange(4) for _ in range(300)]) for i in range(32)}
    p, greedy = make(), make(**{"proposal.budget.rule": "fixed", **STATIC})
    simulate(p, texts)
    simulate(greedy, texts)
    assert p.drain().step_seconds < 0.5 * greedy.drain().step_seconds


def test_calibration_predicts_acceptance() -> None:
    p = make()
    rng = random.Random(0)
    base = {i: story(i, 300) for i in range(8)}
    for version in range(4):
        p.set_version(version)
        p.drain()
        texts = {
            f"{version}-{i}": ([1, 2, i], [t if rng.random() > 0.1 else rng.randrange(5, 500) for t in base[i]])
            for i in base
        }
        simulate(p, texts)
    s = p.drain()
    assert s.predicted / s.drafted == pytest.approx(s.accepted / s.drafted, abs=0.07)


def test_k_is_respected_and_zero_means_no_draft() -> None:
    p = make()
    texts = {"a": ([1, 2], story(1))}
    simulate(p, texts)
    p.k = 0
    assert simulate(p, texts) == 120
    p.k = 2
    p.drain()
    simulate(p, texts)
    assert p.drain().drafted > 0


def test_tokens_past_a_stop_or_the_limit_are_not_history() -> None:
    p = make()
    p.begin("a", [1, 2], 4, stop_ids={9})
    p.step(["a"], [[5, 9, 7]], {"a": [9, 7]})
    p.finish("a")
    p.begin("b", [1, 2], 3)
    p.step(["b"], [[5, 6, 7, 8]], {"b": [6, 7, 8]})
    p.finish("b")
    ((_, entry),) = list(p.history)
    assert [r.tokens.tolist() for r in entry.responses] == [[5, 9], [5, 6, 7]]


def test_nothing_past_a_stop_is_counted_or_drafted_for_siblings() -> None:
    p = make(**{"proposal.suffix.sources": ["siblings", "past"], "proposal.budget.rule": "fixed"})
    p.begin("a", [1, 2], 40, stop_ids={9})
    p.begin("b", [1, 2], 40, stop_ids={9})
    p.step(["a", "b"], [[5], []], {})
    p.step(["a", "b"], [[6, 9, 7, 8], []], {"a": [6, 9, 7]})
    assert (p.stats.emitted, p.stats.drafted, p.stats.accepted) == (3, 3, 2)
    assert p.step(["b"], [[5]], {}) == [[6, 9]]


def test_a_prompt_near_the_context_limit_is_not_drafted_past_it() -> None:
    p = DraftEngine(RollspecConfig.load("default", overrides={"proposal.budget.rule": "fixed"}, env={}), 12)
    for name in ("a", "b"):
        p.begin(name, [1, 2, 3, 4], 100)
    p.step(["a"], [[5, 6, 7, 8, 9, 10, 11, 12, 13]], {"a": [5] * 8})
    assert p.requests["a"].output == [5, 6, 7, 8, 9, 10, 11, 12]
    (draft,) = p.step(["b"], [[5]], {})
    assert 0 < len(draft) <= 6


def test_unknown_requests_and_prefill_rows_are_skipped() -> None:
    p = make()
    p.begin("a", [1, 2], 10)
    assert p.step(["a", "stranger"], [[], [4]], {}) == [[], []]
    p.finish("stranger")


def test_trees_stay_within_their_bound() -> None:
    bound = 1 << 20
    p = make(**{"history.max_bytes": bound // 4})
    for i in range(60):
        simulate(p, {f"{i}": ([i, 1, 2], story(i, 200))})
    assert p.suffix.corpus_bytes <= 1.1 * bound


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_interleaving_keeps_counts_consistent(data: st.DataObject) -> None:
    """Requests that begin, step, finish and change version in any order: counts add up, drafts fit."""
    p = make(**{"proposal.k_max": 4})
    running: dict[str, list[int]] = {}
    emitted = 0
    for n in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["begin", "step", "step", "finish", "version"]))
        if action == "begin":
            p.begin(f"r{n}", data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=5)), 50)
            running[f"r{n}"] = []
        elif action == "step" and running:
            ids = list(running)
            new = [data.draw(st.lists(st.integers(0, 3), max_size=3)) for _ in ids]
            out = p.step(ids, new, {r: d for r, d in running.items() if d})
            assert all(len(d) <= 4 for d in out)
            emitted += sum(map(len, new))
            running = dict(zip(ids, out, strict=True))
        elif action == "finish" and running:
            r = data.draw(st.sampled_from(sorted(running)))
            p.finish(r)
            del running[r]
        elif action == "version":
            p.set_version(n)
    s = p.drain()
    assert s.emitted == emitted
    assert s.accepted <= s.drafted
    assert p.requests.keys() == running.keys()


def test_as_tokens_is_contiguous_int32() -> None:
    a = as_tokens(range(10))[::2]
    assert as_tokens(a).flags.c_contiguous


def test_no_draft_reaches_the_token_from_which_on_a_request_may_stop() -> None:
    """vLLM decides by the first row of a step whether the one after all drafts may stop."""
    p = DraftEngine(RollspecConfig.load({"proposal.budget.rule": "fixed", "tuning.strategy": "static"}, env={}), 256)
    text = list(range(20, 40))
    for name, said, least in (("old", [], 0), ("new", [], 6), ("goes on", text[:2], 4)):
        p.begin(name, [1, 2, 3], 100, emitted=said, min_tokens=least)
        for at in range(len(said), len(text)):
            ((draft),) = p.step([name], [[text[at]]], {})
            out = at + 1
            assert draft == text[out:][: len(draft)]
            if 6 <= out <= 17 and name != "old":
                assert len(draft) > 1
            elif out < 6 and name != "old":
                assert len(draft) <= 6 - out - 1
        p.finish(name)


def test_the_turns_of_a_rollout_share_what_is_remembered_with_its_siblings() -> None:
    """The second turn is drafted from a sibling's second, and from what the tool said to itself; history has what was
    sampled, and no word of the tool's.
    """
    p = make(**STATIC, **{"proposal.budget.rule": "fixed"})
    prompt, tool, call = [1, 2, 3], [900, 901, 902, 903, 904, 905], [50, 51, 52, 53]
    answer = [60, 61, 62, 63, 64, 65]

    def turn(name: str, number: int, prompt: list[int], since: int) -> None:
        p.begin(f"{name}{number}", prompt, 90, turn=Turn(name, number, 3, since))

    for name in "ab":
        turn(name, 0, prompt, 3)
    said = {"a": call, "b": [70, 71, 72, 73]}
    p.step(["a0", "b0"], list(said.values()), {})
    for name in "ab":
        p.finish(f"{name}0")
        reply = tool if name == "a" else [800, 801, 802, 905]
        turn(name, 1, [*prompt, *said[name], *reply], 7)
    p.step(["a1"], [answer], {})
    p.step(["a1", "b1"], [[66], [60]], {})
    assert p.requests["b1"].lookup.draft.token_ids[:2] == [61, 62], "not from its sibling's answer"
    assert p.requests["a1"].key == p.requests["b1"].key == prompt_key(prompt)
    p.step(["a1", "b1"], [[901], [61]], {})
    assert p.requests["a1"].lookup.draft.token_ids[:2] == [902, 903], "what a tool said may be copied"
    for name in ("a1", "b1"):
        p.finish(name)
    kept = p.history.get(prompt_key(prompt))
    assert kept is not None and len(p.history) == 1 and kept.prompt.tolist() == prompt
    assert [(r.turn, r.tokens.tolist()) for r in kept.responses] == [
        (0, call), (0, said["b"]), (1, [*answer, 66, 901]), (1, [60, 61]),
    ]  # fmt: skip
    assert p.suffix._groups[prompt_key(prompt)].ended == {0: [4, 4], 1: [2, 8]}, "expected lengths are a turn's"


def test_a_private_turn_and_one_that_does_not_fit_its_prompt_stand_alone() -> None:
    p = make(**STATIC)
    p.begin("a", [1, 2, 3, 4], 9, private=True, turn=Turn("x", 1, 2, 3))
    p.begin("b", [1, 2, 3, 4], 9, turn=Turn("y", 1, 2, 5))
    assert p.requests["a"].key == "private-a" and p.requests["b"].key == prompt_key([1, 2, 3, 4])
    assert p.requests["b"].root.tolist() == [1, 2, 3, 4]


def test_thinking_and_the_rest_are_counted_apart() -> None:
    """By where a request is when a step begins; a template may open the thinking in the prompt."""
    p = make(**STATIC, **{"proposal.budget.rule": "fixed"})
    p.think = (900, 901)
    p.begin("opens", [1, 2, 900, 3], 90)
    p.begin("does not", [900, 1, 901, 3], 90)
    p.step(["opens", "does not"], [[5], [6, 900, 7]], {})
    p.step(["opens", "does not"], [[5, 901, 8], [6]], {"opens": [5, 901, 9]})
    p.step(["opens", "does not"], [[8], [6, 901]], {})
    s = p.drain()
    assert s.thinking == [[2, 4, 0, 0], [4, 7, 3, 2]]
    m = to_metrics(s)
    assert m["rollspec/accept/thinking_length"] == 7 / 4 and m["rollspec/accept/answer_length"] == 2.0
    assert m["rollspec/accept/thinking_rate"] == 2 / 3 and "rollspec/accept/answer_rate" not in m
    assert m["rollspec/accept/thinking_share"] == 7 / 11
    p.think = None
    p.step(["opens"], [[8]], {})
    assert not [name for name in to_metrics(p.drain()) if "thinking" in name or "answer" in name]
