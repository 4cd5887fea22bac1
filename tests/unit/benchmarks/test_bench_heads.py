"""Benchmarks of draft heads: what one adds, on which prompts, how it is trained and how its drafts are drawn."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_target import filled, target

from benchmarks import draws, head, head_prompts, head_table, recipes
from drafter_online.buffer import Buffer
from drafter_online.head import fresh, save
from drafter_online.held_out import split
from rollspec.errors import RollspecError


def test_what_a_head_adds_is_given_by_workload_over_none_and_over_suffix_drafts() -> None:
    def round_of(seconds: float, accepted: int, source: str | None) -> list[dict[str, Any]]:
        counts = {source: [9, 2 * accepted, accepted]} if source else {}
        one = {"tokens": 100, "drafted": 2 * accepted, "accepted": accepted, "by_source": counts}
        predicted = {source: 1.5 * accepted} if source else {}
        return [{**one, "seconds": s, "cpu_seconds": 3.0, "predicted_by": predicted} for s in (seconds, seconds / 2)]

    runs = {
        "none": [round_of(4.0, 0, None)] * 2,
        "suffix": [round_of(4.0, 5, "suffix")] * 2,
        "head": [round_of(2.0, 50, "eagle3")] * 2,
    }
    s = head_table.summarise(runs, head.workloads(2))
    assert (
        s["fresh"]["head"]["speedup_over_none"]["median"] == s["repeated"]["head"]["speedup_over_suffix"]["median"] == 2
    )
    assert s["fresh"]["head"]["acceptance_length"] == 2.0 and s["fresh"]["none"]["acceptance_rate"] is None
    assert s["fresh"]["head"]["by_source"] == {"eagle3": [18, 200, 100]}
    assert s["fresh"]["head"]["speedup_over_none_cpu"]["median"] == 1.0
    assert s["fresh"]["head"]["calibration"]["all"]["ratio"] == 1.5 and s["fresh"]["none"]["calibration"] == {
        "all": {"predicted": 0, "drafted": 0, "accepted": 0, "ratio": None}
    }
    assert head_table.table(4, s).row_count == 6
    assert head.workloads(1) == ("fresh",) and head.workloads(4)[2:] == ("repeated 2", "repeated 3")


def test_prompts_that_a_head_was_trained_on_are_known_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [[7, i] for i in range(12)]
    keys = [head_prompts.prompt_key(p) for p in ids]
    buffer, model = Buffer(), target(tmp_path)
    for i in range(8):
        buffer.add(dataclasses.replace(filled(model, 1).__iter__().__next__(), prompt_key=keys[i]))
    folder = tmp_path / "head"
    buffer.save(folder / "buffer")
    (folder / "make-head.json").write_text('{"hold_out": 0.25}')
    held = {s.prompt_key for s in split(buffer, 0.25)[1]}
    assert held and head_prompts.trained_on(folder) == set(keys[:8]) - held
    assert head_prompts.trained_on(tmp_path / "other") is None
    monkeypatch.setattr(head_prompts.prompts, "tokenized", lambda rows, model, room: (ids, 0))
    every, fresh = (head_prompts.Prompts.of(model, None, folder, given) for given in (None, folder))
    assert every.facts(every.order(0, 13)) == {
        "prompts_used": 12, "prompts_trained_on": 8 - len(held), "prompts_used_again": 1
    }  # fmt: skip
    assert len(fresh.found) == 4 + len(held) and fresh.facts(fresh.order(1, 4))["prompts_trained_on"] == 0
    assert fresh.order(1, 4) != fresh.order(2, 4)
    with pytest.raises(RollspecError, match=r"has no samples in buffer/"):
        head_prompts.Prompts.of(model, None, folder, tmp_path)


def test_recipes_train_from_one_folder_and_are_measured_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, model = tmp_path / "head", target(tmp_path)
    filled(model, 12).save(folder / "buffer")
    record = {"target": str(model), "aux_layers": [1, 2, 3], "temperature": 1.0}
    (folder / "make-head.json").write_text(json.dumps(record))
    monkeypatch.setattr(recipes, "STEPS", 2)
    out = recipes.run(folder, ["default", "random start"], (0,), 0.2, 40, out=tmp_path / "out.json")
    found = json.loads(out.read_text())["arms"]
    assert list(found) == ["default", "random start"]
    for runs in found.values():
        curve = runs["0"]["curve"]
        assert 1 < len(curve) <= recipes.LOOKS + 1 and curve[-1]["cpu_seconds"] >= 0.2
        assert (
            1.0 <= curve[-1]["acceptance_length"] <= 3.0
            and runs["0"]["max_acceptance"] == found["default"]["0"]["max_acceptance"]
        )


def test_draws_of_a_head_are_accepted_by_their_rule(tmp_path: Path) -> None:
    p = torch.tensor([[0.6, 0.3, 0.1], [0.5, 0.5, 0.0]]).log()
    q = torch.tensor([[0.6, 0.3, 0.1], [0.0, 0.0, 1.0]]).log()
    greedy, noise, probabilistic, bound = draws.rates(p, q)
    assert greedy.tolist() == pytest.approx([0.6, 0.0]) and bound.tolist() == pytest.approx([0.6, 0.5])
    assert noise.tolist() == [1.0, 0.0] and probabilistic.tolist() == pytest.approx([1.0, 0.0])

    folder, model = tmp_path / "head", target(tmp_path)
    save(fresh(model, aux=(1, 2, 3), seed=0), folder)
    filled(model, 12).save(folder / "buffer")
    (folder / "make-head.json").write_text(json.dumps({"target": str(model), "aux_layers": [1, 2, 3]}))
    found = json.loads(draws.run([folder], tmp_path / "out.json").read_text())["heads"]["head"]
    lengths = found["acceptance_length"]
    assert (
        found["drafts"] > 0 and 1.0 <= lengths["greedy"] <= lengths["bound"] and lengths["noise"] <= 1.0 + draws.STEPS
    )
