"""The sweep of costs: what it covers, what is fitted to it, and where the fit is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import cost, cost_table
from rollspec.config import RollspecConfig
from rollspec.errors import HistoryError, RollspecError
from rollspec.tuning import store
from rollspec.tuning.cost import CostModel
from rollspec.tuning.tuner import Tuner


def seconds(tokens: float, context_tokens: float) -> float:
    """Flat to 32 tokens, then 0.5 ms each; 2 us per context token."""
    return 0.010 + 0.0005 * max(0.0, tokens - 32) + 2e-6 * context_tokens


def swept() -> tuple[list[list[Any]], list[list[cost_table.Cell]]]:
    """Two rounds of the whole grid, with no noise."""
    steps: list[list[Any]] = [[], []]
    cells: list[list[cost_table.Cell]] = [[], []]
    for prompt in (16, 800):
        for spot in cost.grid(cost.REQUESTS, cost.DRAFTS, prompt):
            tokens, context_tokens = spot.requests * (1 + spot.k), float(spot.requests * prompt)
            for r in range(2):
                took = seconds(tokens, context_tokens)
                steps[r] += [(tokens, took, context_tokens, spot.requests)] * 10
                accepted = None if spot.all_accepted is None else float(spot.all_accepted)
                cells[r].append(
                    cost_table.Cell(spot.requests, spot.k, spot.all_accepted, prompt, context_tokens, took, accepted)
                )
    return steps, cells


def test_the_sweep_covers_accepted_and_rejected_with_whole_drafts() -> None:
    spots = list(cost.grid(cost.REQUESTS, cost.DRAFTS))
    assert len(spots) == len(set(spots)) == len(cost.REQUESTS) * (1 + 2 * (len(cost.DRAFTS) - 1))
    assert {s.all_accepted for s in spots if not s.k} == {None}
    assert cost.Spot(8, 4, True).length == 1 + 5 * cost.STEPS
    assert cost.Spot(8, 16, False).length == 1 + cost.STEPS + 16
    assert max(s.length for s in spots) + cost.PROMPT <= cost.LEAST_LEN


def test_the_fit_finds_the_knee_and_the_picture_is_drawn(tmp_path: Path) -> None:
    steps, cells = swept()
    model = cost.fit(steps)
    s = cost_table.summarise(model, cells, cost.fit(steps[:-1]))
    assert s["error"]["median"] < 0.05 and s["error_held_out"]["cells"] == len(cells[0])
    assert s["knee"]["flat"] and s["knee"]["knee"] == pytest.approx(32, rel=0.05)
    assert s["knee"]["us_per_token"] == pytest.approx(500, rel=0.05)
    assert s["doubles"] == pytest.approx(52, abs=8)
    assert s["accepted_over_rejected"] == pytest.approx(1.0)
    assert s["ms_per_1000_context_tokens"] == pytest.approx(2.0, rel=0.25)
    assert [o["to"] for o in s["octaves"]][-1] == 64 * 17
    t = cost_table.table(s)
    assert t.row_count == len(cost.REQUESTS) and "knee" in str(t.caption)
    drawn = cost_table.picture(model, s, tmp_path / "cost.png")
    assert drawn is not None and drawn.stat().st_size > 10_000


def test_without_a_flat_part_there_is_no_knee() -> None:
    cells = [cost_table.Cell(b, k, None, 16, 0.0, 0.001 * b * (1 + k), None) for b in (1, 8, 64) for k in (0, 4, 16)]
    found = cost_table.knee(cells, 0.0)
    assert not found["flat"] and found["error"] < 0.05


def test_a_job_starts_from_the_stored_fit(tmp_path: Path) -> None:
    steps, _ = swept()
    model, machine = cost.fit(steps), {"device": "here"}
    cost.keep(tmp_path, model, machine)
    tuning, problem = store.load(tmp_path, machine)
    assert problem is None and tuning is not None
    c = RollspecConfig.load("default")
    again = Tuner(c.tuning, c.proposal.k_max, c.proposal.drafters)
    again.restore(tuning["tuner"])
    assert again.cost.fitted and again.cost.seconds(64) == pytest.approx(model.seconds(64), rel=0.05)
    # What the job learned meanwhile is kept when the sweep is made again.
    tuning["tuner"]["seen"] = 40
    store.save(tmp_path, tuning, machine)
    cost.keep(tmp_path, model, machine)
    assert (store.load(tmp_path, machine)[0] or {})["tuner"]["seen"] == 40


def test_a_checkpoint_that_cannot_be_swept(tmp_path: Path) -> None:
    for text, word in (
        ("{", "readable"),
        ("{}", "vocab_size"),
        ('{"vocab_size": 9, "max_position_embeddings": 64}', "64"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(RollspecError, match=word):
            cost.limits(str(tmp_path))
    (tmp_path / store.FILE).write_text("{")
    with pytest.raises(HistoryError, match="refused"):
        cost.keep(tmp_path, CostModel(), {})
