"""Presets with a draft head, at the step: what they draft when the head is always wrong."""

from __future__ import annotations

import pytest

from rollspec import RollspecConfig
from rollspec.step import DraftEngine


@pytest.mark.parametrize(
    ("preset", "by_batch"),
    [("aurora", {1: 5, 64: 5}), ("osd", {1: 5, 64: 5}), ("respec", {1: 0, 16: 0, 64: 0}), ("day0", {8: 0, 64: 0})],
)
def test_presets_with_a_head_run_the_passes_they_are_named_for(preset: str, by_batch: dict[int, int]) -> None:
    """The head is always wrong: a fixed length is drafted all the same, a tuned one is not."""
    for batch, passes in by_batch.items():
        p = DraftEngine(RollspecConfig.load(preset, env={}), 2048, "eagle3")
        ids = [f"r{i}" for i in range(batch)]
        for i in ids:
            p.begin(i, prompt=[1, 2, 3, 5 + int(i[1:])], max_tokens=200)
        sent: dict[str, list[int]] = {}
        for step in range(30):
            tokens = batch + sum(map(len, sent.values()))
            p.timed(tokens, True, 0.1 + 0.01 * tokens, batch)
            passes = p.prepare(ids, [[10 + step % 7] for _ in ids], sent)
            rows = [[77] * passes for _ in ids] if passes else None
            drafts = p.complete(rows, [[0.5] * passes for _ in ids] if rows else None)
            sent = {i: d for i, d in zip(ids, drafts, strict=True) if d}
        assert [len(d) for d in drafts] == [passes] * batch, (preset, batch)


@pytest.mark.parametrize(("batch", "dear", "passes"), [(1, False, 4), (16, False, 4), (1, True, 0), (64, True, 0)])
def test_respec_drafts_what_its_profile_pays_for(batch: int, dear: bool, passes: int) -> None:
    """All that the head drafts is accepted; the clock says whether verifying is nearly free or costs what it gives."""
    p = DraftEngine(RollspecConfig.load("respec", env={}), 4096, "eagle3")
    ids = [f"r{i}" for i in range(batch)]
    for i in ids:
        p.begin(i, prompt=[1, 2, 3, 5 + int(i[1:])], max_tokens=400)
    sent: dict[str, list[int]] = {}
    played = []
    for _ in range(40):
        tokens = batch + sum(map(len, sent.values()))
        p.timed(tokens, True, 0.1 * (tokens / batch) ** (1.5 if dear else 0.1), batch)
        played.append(n := p.prepare(ids, [[77] * (len(sent.get(i, ())) + 1) for i in ids], sent))
        drafts = p.complete([[77] * n for _ in ids] if n else None, [[0.5] * n for _ in ids] if n else None)
        sent = {i: d for i, d in zip(ids, drafts, strict=True) if d}
    assert {0, 2, 4} <= set(played[:20]), "it profiles every length first"
    assert played[-1] == passes and len({tuple(played[-10:])}) == 1
