"""Drafters of published methods: what each proposes that others would not, and that it drafts alone if it is alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from step_world import World, play

from rollspec import RollspecConfig
from rollspec.config import TuningConfig
from rollspec.drafting.hierarchy import HierarchyDrafting
from rollspec.drafting.recycling import CANDIDATES, Adjacency, TokenRecycling
from rollspec.drafting.siblings import VOTERS, SiblingNgrams, Stand
from rollspec.drafting.suffix import SuffixDrafter
from rollspec.proposal.base import Draft
from rollspec.proposal.ngrams import FOLLOWERS, Ngrams, PromptTables
from rollspec.step import DraftEngine
from rollspec.tuning.tuner import Rows, Tuner

pytestmark = pytest.mark.usefixtures("steady_clock")

SOURCES = {
    "token_recycling": {"token_recycling"},
    "stand": {"stand"},
    "consensus": {"consensus"},
    "hierarchy": {"hierarchy-context", "hierarchy-model", "hierarchy-statistics"},
    "suffix": {"group", "global"},
}
ALL_VERIFIED = {"tuning.strategy": "static", "tuning.guard.enabled": False, "proposal.budget.rule": "fixed"}


def make(*drafters: str, **overrides: Any) -> DraftEngine:
    settings = {"proposal.drafters": list(drafters), **ALL_VERIFIED, **overrides}
    return DraftEngine(RollspecConfig.load(overrides=settings, env={}), 4096)


def say(
    p: DraftEngine, name: str, text: Sequence[int], prompt: Sequence[int] = (1, 2), end: bool = True, **given: Any
) -> None:
    """A request says `text`, a token per step."""
    p.begin(name, list(prompt), 500, **given)
    for token in text:
        p.step([name], [[token]], {})
    if end:
        p.finish(name)


def draft(p: DraftEngine, name: str) -> Draft:
    return p.requests[name].lookup.draft


# ---- who drafts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(SOURCES))
@pytest.mark.parametrize("kept", [False, True])
def test_a_drafter_that_is_configured_alone_drafts_alone(name: str, kept: bool) -> None:
    """Also under kept noise, whose replay is no drafter to choose but what `reuse.mode` is."""
    reuse = {"mode": "coupled", "reuse.mode": "replay"} if kept else {}
    engines = []

    def engine(overrides: dict[str, Any], head: str | None) -> DraftEngine:
        engines.append(DraftEngine(RollspecConfig.load(overrides=overrides, env={}), 2048, head))
        return engines[-1]

    world = World({"proposal.drafters": [name], **ALL_VERIFIED, **reuse}, kept=kept, steps=120, changed=0.2)
    drafted: Counter[str] = Counter()
    for stats in play(world, engine)["stats"]:
        drafted.update({source: row[1] for source, row in stats["by_source"].items()})
    assert set(drafted) <= SOURCES[name] | ({"replay"} if kept else set())
    assert sum(drafted[source] for source in SOURCES[name]) > 0
    (p,) = engines
    assert bool(p.suffix.config.sources) == (name == "suffix"), "no text is kept in a corpus that no drafter reads"
    assert [d for d in p.drafters if isinstance(d, SuffixDrafter)], "which know how long a prompt's responses are"
    assert any(r.suffix.ended for r in p.requests.values())


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_a_drafter_beside_a_head_leaves_no_draft_to_others(name: str) -> None:
    """Per request whichever is worth more drafts, and arms are named by both."""
    world = World({"proposal.drafters": [name, "eagle3"], **ALL_VERIFIED}, head=0.5, steps=120, changed=0.2)
    settings = {"proposal.head.model": "x"}
    found = play(world, lambda o, head: DraftEngine(RollspecConfig.load(overrides=o | settings, env={}), 2048, head))
    drafted: Counter[str] = Counter()
    arms: set[str] = set()
    for stats in found["stats"]:
        drafted.update({source: row[1] for source, row in stats["by_source"].items()})
        arms |= {arm.split(":")[0] for arm in stats["plays"]}
    assert set(drafted) <= SOURCES[name] | {"eagle3"}
    assert drafted["eagle3"] > 0 and sum(drafted[source] for source in SOURCES[name]) > 0
    assert arms <= {f"{name}+eagle3", "none"}, arms


@pytest.mark.parametrize("order", [("token_recycling", "suffix"), ("suffix", "token_recycling")])
def test_drafters_are_asked_in_the_configured_order(order: tuple[str, str]) -> None:
    p = make(*order)
    say(p, "a", [5, 6, 7, 8, 9])
    say(p, "b", [5, 6], end=False)
    assert draft(p, "b").token_ids == [7, 8, 9]
    assert draft(p, "b").source in SOURCES[order[0]]


def test_the_guard_holds_back_all_drafters_that_cost_no_pass_together() -> None:
    """Their proposals are one: were one of them held back alone, the other would go on."""
    t = Tuner(TuningConfig(strategy="static", arms=(4,)), 4, ("token_recycling", "hierarchy"))
    for tokens in (1, 2, 4, 5, 8) * 20:
        t.cost.observe(tokens, 0.01 * tokens, 0.0, 1)  # a draft token costs what a step does
    for _ in range(100):
        t.observe(t.plan(1, 0.0), 1, 0.0, Rows([4], [0]))
    assert t.guard.off == ["hierarchy@1", "token_recycling@1"]
    assert t.plan(1, 0.0).k == 0


@pytest.mark.parametrize("name", sorted(set(SOURCES) - {"suffix"}))
def test_of_a_private_request_nothing_stays(name: str) -> None:
    p = make(name)
    say(p, "secret", [5, 6, 7, 8, 9] * 3, private=True)
    say(p, "b", [5, 6], end=False)
    assert not draft(p, "b").token_ids
    say(p, "open", [5, 6, 7, 8, 9] * 3)
    p.finish("b")
    say(p, "c", [5, 6, 7], end=False)
    assert draft(p, "c").token_ids, "the same text is drafted from where it is not private"


# ---- token recycling ------------------------------------------------------------------------------------------------


def test_token_recycling_walks_candidates_that_no_text_has_in_a_row() -> None:
    p = make("token_recycling")
    say(p, "a", [5, 6, 90], prompt=[1])
    say(p, "b", [6, 7, 91], prompt=[2])
    say(p, "c", [6, 7, 8], prompt=[3])
    say(p, "d", [33, 5], prompt=[4], end=False)
    assert draft(p, "d").token_ids[:2] == [6, 7], "5 6 is of one request, 6 7 of others"


def test_token_recycling_follows_what_was_emitted_last() -> None:
    """Counts would stay with what was said ten times."""
    matrix = Adjacency()
    matrix.add([5, 6] * 11, 22)
    assert matrix.walk(5, 1)[0] == [6]
    matrix.add([5, 7], 1)
    assert matrix.walk(5, 1)[0] == [6], "one exception is one"
    for _ in range(3):
        matrix.add([5, 7], 1)
    assert matrix.walk(5, 1)[0] == [7]


def test_token_recycling_keeps_the_best_candidates_only() -> None:
    matrix = Adjacency()
    for follower in range(100, 120):
        matrix.add([5, follower], 1)
    (row,) = matrix._weights.values()
    assert len(row) == CANDIDATES and 119 in row and 101 not in row
    assert matrix.best[5][0] == max(row, key=row.__getitem__)


def test_token_recycling_learns_of_the_token_that_was_emitted_instead_of_the_draft() -> None:
    p = make("token_recycling")
    say(p, "a", [5, 6, 7, 8], end=False)
    (first,) = p.step(["a"], [[5]], {})
    assert first[:2] == [6, 7]
    p.step(["a"], [[6, 9]], {"a": first})  # 7 was rejected
    matrix = next(d.matrix for d in p.drafters if isinstance(d, TokenRecycling))
    assert set(matrix._weights[6]) == {7, 9}


# ---- STAND ----------------------------------------------------------------------------------------------------------


def test_stand_samples_as_often_as_was_counted() -> None:
    """After the same context three samples of four said 6: so do three drafts of four, and never anything else."""
    p = make("stand", **{"proposal.k_max": 1})
    for n, token in enumerate([6, 6, 7, 6] * 10):
        say(p, f"s{n}", [3, 4, 5, token])
    said: Counter[int] = Counter()
    for n in range(400):
        say(p, f"r{n}", [3, 4, 5], end=False)
        said.update(draft(p, f"r{n}").token_ids)
    assert set(said) == {6, 7} and sum(said.values()) == 400
    assert 0.68 < said[6] / 400 < 0.82, said  # three standard deviations; greedy drafts would give 1


def test_stand_draws_the_same_in_every_run() -> None:
    def run() -> list[list[int]]:
        p = make("stand")
        for n in range(20):
            say(p, f"s{n}", [3, 4, 5, 6 + n % 4, 9, 9 + n % 3])
        drafts = []
        for n in range(9):
            say(p, f"r{n}", [3, 4, 5], end=False)
            drafts.append(draft(p, f"r{n}").token_ids)
        return drafts

    first = run()
    assert first == run() and len({tuple(d) for d in first}) > 1


def test_stand_takes_the_longest_context_that_is_known() -> None:
    p = make("stand")
    for n in range(9):
        say(p, f"x{n}", [30 + n, 40 + n, 5, 7])
    say(p, "a", [3, 4, 5, 6])
    say(p, "b", [3, 4, 5], end=False)
    assert draft(p, "b").token_ids == [6] and draft(p, "b").match_len == 3
    say(p, "c", [88, 89, 5], end=False)
    assert draft(p, "c").token_ids in ([6], [7]) and draft(p, "c").match_len == 1


def test_stand_learns_from_siblings_of_the_same_version_only() -> None:
    p = make("stand")
    say(p, "a", [3, 4, 5, 6])
    say(p, "other", [3, 4], prompt=[9, 9], end=False)
    assert not draft(p, "other").token_ids
    say(p, "same", [3, 4], end=False)
    assert draft(p, "same").token_ids == [5, 6]
    p.set_version(1)
    say(p, "new", [3, 4], end=False)
    assert not draft(p, "new").token_ids
    p.step(["same"], [[5]], {})
    assert draft(p, "same").token_ids == [6], "a request that goes on keeps its table"


# ---- consensus ------------------------------------------------------------------------------------------------------


def test_consensus_counts_siblings_and_not_how_often_one_repeats_itself() -> None:
    p = make("consensus")
    say(p, "a", [3, 4, 5, 9] * 5)
    say(p, "b", [3, 4, 5, 7])
    say(p, "c", [3, 4, 5, 7])
    say(p, "r", [3, 4, 5], end=False)
    assert draft(p, "r").token_ids[0] == 7


def test_consensus_gives_the_requests_own_text_no_vote() -> None:
    p = make("consensus")
    say(p, "r", [3, 4, 5, 9, 3, 4, 5, 9, 3, 4, 5], end=False)
    assert not draft(p, "r").token_ids
    say(p, "b", [3, 4, 5, 7])
    p.step(["r"], [[9]], {})
    for token in (3, 4, 5):
        p.step(["r"], [[token]], {})
    assert draft(p, "r").token_ids == [7]


def test_consensus_merges_paths_that_meet() -> None:
    """The draft begins on one sibling's path, and goes on with two others', which meet it on the way."""
    p = make("consensus")
    say(p, "a", [3, 4, 5, 6, 7, 8, 90, 91])
    say(p, "b", [50, 6, 7, 8, 9, 10])
    say(p, "c", [51, 6, 7, 8, 9, 10])
    say(p, "r", [3, 4, 5], end=False)
    assert draft(p, "r").token_ids == [6, 7, 8, 9, 10]


def test_consensus_is_surer_the_more_siblings_agree() -> None:
    p = make("consensus")
    sure = []
    for n in range(4):
        say(p, f"s{n}", [3, 4, 5, 7])
        say(p, f"r{n}", [3, 4, 5], end=False)
        sure.append(draft(p, f"r{n}").probs[0])
        p.finish(f"r{n}")
    assert sure == sorted(set(sure)) and sure[-1] < 1.0
    say(p, "other", [3, 4, 5, 8])
    say(p, "r", [3, 4, 5], end=False)
    assert draft(p, "r").token_ids == [7] and draft(p, "r").probs[0] < sure[-1]


# ---- hierarchy ------------------------------------------------------------------------------------------------------


def test_hierarchy_asks_context_then_model_then_statistics() -> None:
    p = make("hierarchy", **{"proposal.k_max": 4})
    p.begin("text", [60, 3, 4, 20, 21, 22], 50)  # a prompt: what text in general says after 3 4
    say(p, "a", [3, 4], prompt=[9], end=False)
    assert (draft(p, "a").token_ids, draft(p, "a").source) == ([20, 21, 22], "hierarchy-statistics")
    p.finish("a")
    for n in range(3):
        say(p, f"m{n}", [3, 4, 10, 11, 12], prompt=[8])
    say(p, "b", [3, 4], prompt=[9], end=False)
    assert (draft(p, "b").token_ids, draft(p, "b").source) == ([10, 11, 12], "hierarchy-model")
    say(p, "c", [3, 4, 30, 31, 32, 33, 3, 4], prompt=[9], end=False)
    assert (draft(p, "c").token_ids, draft(p, "c").source) == ([30, 31, 32, 33], "hierarchy-context")


def test_hierarchys_context_is_the_latest_phrase_and_the_models_the_most_frequent() -> None:
    p = make("hierarchy")
    for n, token in enumerate([6, 6, 7]):
        say(p, f"m{n}", [3, 4, token])
    say(p, "a", [3, 4], prompt=[9], end=False)
    assert draft(p, "a").token_ids == [6]
    say(p, "b", [3, 4, 6, 3, 4, 6, 3, 4, 8, 3, 4], prompt=[9], end=False)
    assert draft(p, "b").token_ids[0] == 8


def test_hierarchys_context_is_the_requests_own_prompt_and_response() -> None:
    p = make("hierarchy")
    p.begin("a", [7, 3, 4, 5, 6], 50)
    p.step(["a"], [[3]], {})
    (drafted,) = p.step(["a"], [[4]], {})
    assert drafted == [5, 6, 3, 4], "four tokens at most, on past the phrase's end"
    p.begin("b", [7], 50, emitted=[3, 4, 9, 3])
    (drafted,) = p.step(["b"], [[4]], {})
    assert drafted[0] == 9


def test_hierarchys_databases_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollspec.drafting import hierarchy

    monkeypatch.setattr(hierarchy, "MOST_ROWS", 100)
    monkeypatch.setattr(hierarchy, "KEYS", 5)
    p = make("hierarchy")
    d = next(d for d in p.drafters if isinstance(d, HierarchyDrafting))
    for n in range(40):
        say(p, f"r{n}", [3, 4, 5, *range(100 * n, 100 * n + 9)], prompt=range(1000 * n, 1000 * n + 9))
        assert all(len(t.rows) <= 100 for t in d.lower.values()) and len(d._known) <= 5
    assert not d.contexts
    assert d.lower["model"].after([3, 4])[0].get(5, 0) > 1, "what is frequent stays"
    assert not d.lower["model"].after([100, 101])[0], "what was said once goes"


# ---- tables ---------------------------------------------------------------------------------------------------------


def test_ngrams_keep_the_frequent_followers() -> None:
    table = Ngrams(1)
    for _ in range(3):
        table.add([5, 6], 1)
    for token in range(100, 130):
        table.add([5, token], 1)
    row, length = table.after([5])
    assert len(row) == FOLLOWERS and row[6] == 3 and length == 1
    assert table.after([99]) == ({}, 0) and table.after([]) == ({}, 0)


def test_prompt_tables_drop_those_that_no_request_runs_in_first() -> None:
    tables = PromptTables(16, 1)
    first, second = tables.open("a", 0), tables.open("b", 0)
    for t in (first, second):
        t.ngrams.add(range(9), 9)
        assert len(t.ngrams.rows) == 8
    tables.close(first, private=False)
    assert tables.open("a", 0) is first, "it is kept while there is room"
    second.ngrams.add(range(20, 30), 10)
    tables.close(second, private=False)
    assert list(tables._tables) == ["a"] and tables.open("b", 0) is not second
    first.ngrams.add(range(50, 60), 10)
    tables.close(first, private=False)
    assert tables.open("a", 0) is not first
    assert not any(t.ngrams.rows for t in tables._tables.values())


def test_siblings_are_distinguished_up_to_a_number() -> None:
    """A prompt that is served for ever must not make votes of ever more bits."""
    p = make("consensus")
    for n in range(3 * VOTERS):
        say(p, f"s{n}", [3, 4, 5, 7])
    (d,) = (d for d in p.drafters if isinstance(d, SiblingNgrams))
    (table,) = d.tables._tables.values()
    assert all(bits < 1 << VOTERS for row in table.ngrams.rows.values() for bits in row.values())
    assert not d.running
    assert not isinstance(d, Stand)
