"""How far a policy has moved, and the draft heads that are compared over its versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.drift import Drift
from benchmarks.moving import KEPT, MIDWAY, OLD_TEXT, START, Asked, Version, distance, heads_over, last_quarter, samples
from drafter_online.architecture import aux_layers

INFO = {"kind": "story", "totals": []}


class Words:
    """The part of a tokenizer that is asked for."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "Answer: 7"


@pytest.fixture(scope="module")
def moved(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Drift, list[Any]]:
    """A policy, and one whose weights are a little other."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    start = tiny_target / "model.safetensors"
    torch.manual_seed(0)
    later = tmp_path_factory.mktemp("later") / "model.safetensors"
    save_file({k: v + 0.3 * v.std() * torch.randn_like(v) for k, v in load_file(start).items()}, later)
    found = Drift(str(tiny_target), "", [str(start), str(later)], "a test")
    models = [AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval() for _ in found.weights]
    models[1].load_state_dict(load_file(later), strict=False)
    return found, models


def said(models: list[Any], version: int) -> list[Any]:
    aux = aux_layers(models[0].config.num_hidden_layers)
    asked = [p for p in (Asked([3, 4, 5], "7", INFO), Asked([6, 7], "8", INFO)) for _ in range(2)]
    answers = [[10 + version] * 12] * 4
    return samples(models[version], Words(), asked, answers, version, aux)


def test_a_policy_is_as_far_as_it_has_moved(moved: tuple[Drift, list[Any]]) -> None:
    _, models = moved
    found = said(models, 1)
    assert [s.target_version for s in found] == [1] * 4
    assert len({s.prompt_key for s in found}) == 2
    assert [s.reward for s in found] == [1, 1, found[2].reward, found[2].reward] and found[2].reward < 1
    assert distance(models[0], models[0], found)["kl_from_start"] == 0
    assert distance(models[1], models[0], found)["kl_from_start"] > 1e-3


def test_heads_start_alike_and_only_those_that_train_change(moved: tuple[Drift, list[Any]], given_head: Path) -> None:
    found, models = moved
    texts = [said(models, v) for v in (0, 1)]
    versions = [Version(found.weights[i], texts[i], texts[i], {}) for i in (0, 1, 1, 1)]
    rows = heads_over(found.model, given_head, versions, 3, 0, 1e-2)
    assert len({rows[name][0] for name in rows}) == 1
    assert rows[KEPT][:3] == rows[MIDWAY][:3]
    assert rows[START][1] == rows[START][2] == rows[START][3]
    assert rows[MIDWAY][2] == rows[MIDWAY][3]
    assert rows[KEPT][3] > rows[START][3]
    assert rows[OLD_TEXT][0] == rows[START][0]


def test_the_last_quarter_is_compared_seed_by_seed() -> None:
    lengths = {KEPT: [[1, 1, 1, 3.0], [1, 1, 1, 2.0]], START: [[1, 1, 1, 2.0], [1, 1, 1, 2.0]]}
    found = last_quarter(lengths)
    assert found[START] == {"length": 2.0, "kept_over_it": [1.5, 1.0]}
