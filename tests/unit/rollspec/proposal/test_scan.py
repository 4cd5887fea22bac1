"""Lookup by scan: it gives what the definition says, whatever was appended, moved and forgotten."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lookup_reference import reference

from rollspec.proposal import scan
from rollspec.proposal.base import DEPTH, NOTHING
from rollspec.proposal.scan import MIN_PROB, OCCURRENCES, SEPARATOR, SPEC_FACTOR, Corpus, Found, extend, look_up


def looked_up(corpus: Corpus, context: list[int], k: int) -> Found:
    """What one request finds in one corpus."""
    return look_up([corpus], None, [[*[NOTHING] * DEPTH, *context][-DEPTH:]], [k])[0]


def defined(tokens: Any, context: list[int], k: int) -> Found:
    """What the definition drafts for one request from a whole corpus."""
    row = np.full((1, DEPTH), NOTHING, np.int32)
    row[0, DEPTH - len(context[-DEPTH:]) :] = context[-DEPTH:]
    ends, rooms = np.array([len(tokens)]), np.array([k], np.int32)
    return reference(tokens, np.array([0]), ends, row, rooms, SPEC_FACTOR, MIN_PROB)


def corpus_of(*sequences: list[int]) -> Corpus:
    corpus = Corpus()
    for i, tokens in enumerate(sequences):
        corpus.extend(i, tokens)
    return corpus


def draft(found: Found) -> tuple[list[int], int]:
    n = int(found.counts[0])
    return found.tokens[0, :n].tolist(), int(found.matches[0])


def test_the_longest_match_that_most_follow_is_the_draft() -> None:
    tokens = corpus_of([7, 4, 9, 5, 8, 8], [2, 4, 9, 5, 3, 6], [1, 9, 5, 8, 8]).tokens
    found = defined(tokens, [0, 4, 9, 5], 4)
    assert draft(found) == ([8, 8], 2), (
        "two of three at length 2 (1.33) are worth more than one of two at length 3 (1.0)"
    )
    assert found.probs[0, :2] == pytest.approx([2 / 3, 2 / 3])
    assert draft(defined(tokens, [7, 4, 9, 5], 4)) == ([8, 8], 4), "all that match are of one mind"


def test_a_match_ends_where_its_response_does() -> None:
    tokens = corpus_of([1, 2], [3, 4, 5]).tokens
    assert draft(defined(tokens, [2, 3], 4)) == ([4, 5], 1), "2 and 3 do not follow each other in the corpus"
    assert draft(defined(tokens, [1, 2], 4)) == ([], 0), "nothing follows, and the next response does not"


def test_a_chain_is_bound_by_its_match_and_its_room() -> None:
    tokens = corpus_of(list(range(1, 60))).tokens
    assert draft(defined(tokens, [99, 10], 16)) == ([11, 12], 1)
    assert draft(defined(tokens, list(range(1, 11)), 16))[0] == list(range(11, 27))
    assert draft(defined(tokens, list(range(1, 11)), 3))[0] == [11, 12, 13]


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(2, 30))
def test_chains_of_places_find_what_the_definition_does(rng: random.Random, symbols: int) -> None:
    """Sequences grow in turns, move, and are forgotten meanwhile."""
    corpus = Corpus()
    kept: dict[int, list[int]] = {}
    for turn in range(rng.randint(1, 12)):
        sequence = rng.choice([*kept, turn])
        more = rng.choices(range(symbols), k=rng.randint(1, 40))
        corpus.extend(sequence, more)
        kept.setdefault(sequence, []).extend(more)
        if rng.random() < 0.2:
            gone = rng.choice(list(kept))
            corpus.remove(gone)
            del kept[gone]
    stretches = " ".join(map(str, corpus.tokens.tolist())).split(str(SEPARATOR))
    lying = sorted([int(t) for t in stretch.split()] for stretch in stretches if stretch.strip())
    assert lying == sorted(kept.values()), "every sequence lies there once and whole"
    for _ in range(4):
        context = rng.choices(range(symbols), k=rng.randint(1, DEPTH))
        if kept and rng.random() < 0.7:
            said = rng.choice(list(kept.values()))
            context = said[: rng.randint(1, len(said))]
        # One token: of equal votes the newest wins, and which is the newest an array does not tell.
        found, chain = defined(corpus.tokens, context, 1), looked_up(corpus, context, 1)
        assert chain.scores[0] == pytest.approx(found.scores[0])
        assert chain.matches[0] == found.matches[0]


def test_in_the_order_of_ages_chains_and_definition_agree_exactly() -> None:
    rng = random.Random(0)
    drafted = 0
    for _ in range(200):
        symbols = rng.randint(2, 40)
        corpus = corpus_of(*(rng.choices(range(symbols), k=rng.randint(1, 60)) for _ in range(rng.randint(1, 5))))
        said = [t for t in corpus.tokens.tolist() if t >= 0]
        at = rng.randrange(len(said))
        context = said[max(0, at - DEPTH) : at + 1]
        found, chain = defined(corpus.tokens, context, 12), looked_up(corpus, context, 12)
        n = int(found.counts[0])
        assert draft(chain) == draft(found)
        assert chain.probs[0, :n] == pytest.approx(found.probs[0, :n])
        drafted += n
    assert drafted > 500


def test_more_occurrences_than_vote() -> None:
    """The newest do, and a long match is found behind any number of short ones."""
    old, new = [1, 2, 3, 4, 5, 6], [9, 3, 7]
    corpus = corpus_of(old, *([new] * 3 * OCCURRENCES))
    assert draft(looked_up(corpus, [8, 3], 4))[0] == [7]
    assert draft(looked_up(corpus, [1, 2, 3], 3))[0] == [4, 5, 6]


def test_memory_is_of_the_order_of_the_text() -> None:
    corpus = Corpus()
    for i in range(50):
        corpus.extend(i, [i] * 99)
        if i >= 10:
            corpus.remove(i - 10)
    assert corpus.estimate_memory() < 40 * 2 * 1000
    assert draft(looked_up(corpus, [3, 3], 4))[0] == []
    assert draft(looked_up(corpus, [45, 45], 4))[0] == [45] * 4


def test_a_batch_finds_what_each_one_finds_alone_or_the_fallback_where_that_is_worth_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scan, "WEAK_MATCH", 3)
    rng = random.Random(1)
    corpora = [corpus_of(*(rng.choices(range(8), k=30) for _ in range(3))) for _ in range(12)]
    shared = corpus_of(*(rng.choices(range(8), k=60) for _ in range(3)))
    contexts = [[NOTHING] * (DEPTH - n) + rng.choices(range(8), k=n) for n in range(1, 13)]
    rooms = [n % 5 for n in range(12)]
    found, wider = look_up(corpora, shared, contexts, rooms)
    for b, (own, context, room) in enumerate(zip(corpora, contexts, rooms, strict=True)):
        alone, other = (looked_up(c, context, room) for c in (own, shared))
        assert wider[b] == (alone.matches[0] < 3 and other.scores[0] > alone.scores[0])
        assert draft(Found(*(x[b : b + 1] for x in found))) == draft(other if wider[b] else alone)
    assert 0 < wider.sum() < 12


def test_texts_written_in_one_call_lie_as_written_one_by_one() -> None:
    """Some find room where they lie, others are moved in between."""
    rng = random.Random(2)
    together, apart = [Corpus() for _ in range(3)], [Corpus() for _ in range(3)]
    for _ in range(60):
        rows = [(c, s, rng.choices(range(6), k=rng.randint(1, 9))) for c in range(3) for s in range(4)]
        extend([(together[c], s, tokens) for c, s, tokens in rows])
        for c, s, tokens in rows:
            apart[c].extend(s, tokens)
    for one, other in zip(together, apart, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert (one._rows[:, : one._used] == other._rows[:, : other._used]).all() and (one._heads == other._heads).all()
