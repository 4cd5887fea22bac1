"""Policy versions of programs that do not tell them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vllm_like import plays

from rollspec.engine.bridge import PolicyWatch
from rollspec.engine.vllm.hooks.table import LoadWeights


@plays("vllm.model_executor.models.qwen3:Qwen3ForCausalLM")
class Model:
    def __init__(self) -> None:
        self.loaded = 0

    def load_weights(self, weights: object) -> str:
        self.loaded += 1
        return "names"


def watch_of(model: Model, begin: Callable[[], Any]) -> PolicyWatch:
    watch = PolicyWatch(begin)
    LoadWeights.wrap(model, watch.load, "rollspec.engine.vllm.v2.install")
    return watch


def test_loading_begins_a_version_at_the_next_step() -> None:
    model, begun = Model(), []
    watch = watch_of(model, lambda: begun.append(1))
    watch.before_step()
    assert begun == []
    for _ in range(3):  # one call per parameter
        assert model.load_weights([]) == "names"
    assert model.loaded == 3 and begun == []
    watch.before_step()
    watch.before_step()
    assert begun == [1]


def test_once_the_version_is_announced_it_is_not_guessed() -> None:
    model, begun = Model(), []
    watch = watch_of(model, lambda: begun.append(1))
    model.load_weights([])
    watch.announced()
    watch.before_step()
    model.load_weights([])
    watch.before_step()
    assert begun == []


def test_a_failure_is_said_once_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    watch = watch_of(model, lambda: 1 / 0)
    for _ in range(2):
        model.load_weights([])
        watch.before_step()
    assert len(caplog.records) == 1 and "not counted any more" in caplog.text
