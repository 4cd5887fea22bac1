"""Presets with a learned drafter, at the proposer: what they draft when the head is always wrong."""

from __future__ import annotations

import pytest

from rollspec import RollspecConfig
from rollspec.step import Engine


@pytest.mark.parametrize(
    ("preset", "by_batch"),
    [("aurora", {1: 5, 64: 5}), ("osd", {1: 5, 64: 5}), ("respec", {1: 4, 16: 2, 64: 0}), ("day0", {8: 0, 64: 0})],
)
def test_presets_with_a_head_run_the_passes_they_are_named_for(preset: str, by_batch: dict[int, int]) -> None:
    """The head is always wrong: a fixed length is drafted all the same, a tuned one is not."""
    for batch, passes in by_batch.items():
        p = Engine(RollspecConfig.load(preset, env={}), 2048, "eagle3")
        ids = [f"r{i}" for i in range(batch)]
        for i in ids:
            p.begin(i, prompt=[1, 2, 3, 5 + int(i[1:])], max_tokens=200)
        sent: dict[str, list[int]] = {}
        for step in range(30):
            passes = p.prepare(ids, [[10 + step % 7] for _ in ids], sent)
            rows = [[77] * passes for _ in ids] if passes else None
            drafts = p.complete(rows, [[0.5] * passes for _ in ids] if rows else None)
            sent = {i: d for i, d in zip(ids, drafts, strict=True) if d}
        assert [len(d) for d in drafts] == [passes] * batch, (preset, batch)
