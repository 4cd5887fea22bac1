"""What the scheduler guessed ahead becomes what is so: counts, drafts, masks."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollspec.engine.vllm import overlap, places


@dataclass
class Cached:
    req_ids: list[str]
    resumed_req_ids: set[str] = field(default_factory=set)
    num_computed_tokens: list[int] = field(default_factory=list)
    num_output_tokens: list[int] = field(default_factory=list)


@dataclass
class Scheduled:
    scheduled_cached_reqs: Cached
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    scheduled_spec_decode_tokens: dict[str, list[int]]


@dataclass
class Grammar:
    structured_output_request_ids: list[str]
    grammar_bitmask: Any


class Runner:
    """Records what reaches the model; says nothing and drafts what it is told."""

    def __init__(self, said: dict[str, int]) -> None:
        self.requests = {r: SimpleNamespace(output_token_ids=[7] * n) for r, n in said.items()}
        self.execute_model_state: Any = None
        self.seen: Any = None
        self.grammar: Any = None
        self.drafts: dict[str, list[int]] = {}
        self.rows: list[str] = []

    def execute_model(self, scheduled: Any) -> None:
        self.seen = scheduled
        self.execute_model_state = object()

    def sample_tokens(self, grammar: Any) -> Any:
        self.grammar = grammar
        self.execute_model_state = None
        return SimpleNamespace()

    def take_draft_token_ids(self) -> Any:
        self.rows = list(self.drafts)  # vLLM gives away the very list that names the rows of its batch
        return SimpleNamespace(req_ids=self.rows, draft_token_ids=list(self.drafts.values()))


def scheduled(resumed: set[str] | None = None, **requests: tuple[int, int, int]) -> Scheduled:
    """Of each request: computed tokens, output tokens, places (as the scheduler believes)."""
    cached = Cached(list(requests), resumed or set(), [c for c, _, _ in requests.values()])
    cached.num_output_tokens = [n for _, n, _ in requests.values()]
    counts = {r: 1 + k for r, (_, _, k) in requests.items()}
    places = {r: [-1] * k for r, (_, _, k) in requests.items() if k}
    return Scheduled(cached, counts, sum(counts.values()), places)


def test_rejected_drafts_are_taken_back_and_real_drafts_are_put_in() -> None:
    runner: Any = Runner({"a": 5, "b": 3, "c": 0})
    over = overlap.Overlap(runner)
    runner.drafts = {"b": [1, 2, 3, 4, 5], "a": [9]}
    runner.execute_model(scheduled(a=(10, 1, 4), b=(20, 1, 4)))
    runner.sample_tokens(None)
    # In flight: a had 1 of 4 accepted (so 2 + 3 said), b none; c is in its prompt.
    guess = scheduled(a=(17, 8, 4), b=(27, 7, 4), c=(64, 0, 0))
    runner.execute_model(guess)
    seen = runner.seen
    assert seen.scheduled_cached_reqs.num_computed_tokens == [14, 23, 64]
    assert seen.scheduled_cached_reqs.num_output_tokens == [5, 3, 0]
    assert seen.scheduled_spec_decode_tokens == {"a": [9], "b": [1, 2, 3, 4]}
    assert seen.num_scheduled_tokens == {"a": 2, "b": 5, "c": 1} and seen.total_num_scheduled_tokens == 8
    assert guess.num_scheduled_tokens == {"a": 5, "b": 5, "c": 1}, "the scheduler's own copy changed"
    output = runner.sample_tokens(None)
    assert getattr(output, overlap.DRAFTED) == {"a": 1, "b": 4}
    assert over.take_draft_token_ids().draft_token_ids == list(runner.drafts.values())


def test_a_request_that_starts_over_is_taken_as_it_is() -> None:
    runner: Any = Runner({"a": 5})
    overlap.Overlap(runner)
    runner.execute_model(scheduled({"a"}, a=(0, 5, 0)))
    assert runner.seen.scheduled_cached_reqs.num_computed_tokens == [0]


def test_no_drafts_no_places() -> None:
    runner: Any = Runner({"a": 2})
    overlap.Overlap(runner)
    runner.execute_model(scheduled(a=(10, 3, 4)))  # nothing was drafted after the last step
    assert runner.seen.scheduled_spec_decode_tokens == {} and runner.seen.num_scheduled_tokens == {"a": 1}
    assert getattr(runner.sample_tokens(None), overlap.DRAFTED) == {"a": 0}


def test_a_request_that_begins_has_no_drafts() -> None:
    """Its prompt is cached but for one token, so vLLM reserves places for it as for those that decode."""
    runner: Any = Runner({"a": 2})
    overlap.Overlap(runner)
    runner.drafts = {"a": [9]}
    runner.execute_model(scheduled(a=(10, 1, 4)))
    runner.sample_tokens(None)
    step = scheduled(a=(11, 2, 4))
    step.num_scheduled_tokens["new"], step.scheduled_spec_decode_tokens["new"] = 5, [-1] * 4
    runner.execute_model(step)
    assert runner.seen.num_scheduled_tokens == {"a": 2, "new": 1} and runner.seen.total_num_scheduled_tokens == 3
    assert runner.seen.scheduled_spec_decode_tokens == {"a": [9]}
    masks = np.arange(10)[:, None]
    output = runner.sample_tokens(Grammar(["new", "a"], masks))
    assert runner.grammar.grammar_bitmask[:, 0].tolist() == [0, 5, 6]
    assert getattr(output, overlap.DRAFTED) == {"a": 1}


def test_places_nobody_drafted_for_are_left_out_where_steps_do_not_overlap() -> None:
    runner: Any = Runner({"a": 2})
    places.Unpadded(runner)
    step = scheduled(a=(10, 2, 2))
    step.scheduled_spec_decode_tokens["a"] = [7, 8]
    runner.execute_model(step)
    assert runner.seen is step, "there is nothing to do"
    grammar = Grammar(["a"], np.arange(3)[:, None])
    runner.sample_tokens(grammar)
    assert runner.grammar is grammar
    step = scheduled(a=(13, 5, 3), c=(7, 1, 2))
    step.scheduled_spec_decode_tokens |= {"a": [7, 8, -1], "c": [-1, -1]}
    runner.execute_model(step)
    assert runner.seen.scheduled_spec_decode_tokens == {"a": [7, 8]}
    assert runner.seen.num_scheduled_tokens == {"a": 3, "c": 1} and runner.seen.total_num_scheduled_tokens == 4
    assert step.num_scheduled_tokens == {"a": 4, "c": 3}, "the scheduler's own copy changed"
    runner.sample_tokens(Grammar(["c", "a"], np.arange(7)[:, None]))
    assert runner.grammar.grammar_bitmask[:, 0].tolist() == [0, 3, 4, 5]


def test_masks_follow_the_rows_that_are_left() -> None:
    runner: Any = Runner({"a": 2, "b": 2, "c": 2})
    overlap.Overlap(runner)
    runner.drafts = {"a": [1], "b": [], "c": [1, 2]}
    runner.execute_model(scheduled(c=(1, 2, 0)))
    runner.sample_tokens(None)
    runner.execute_model(scheduled(a=(10, 2, 2), b=(10, 2, 2), c=(10, 2, 2)))
    masks = np.arange(9)[:, None]
    runner.sample_tokens(Grammar(["c", "a", "b"], masks))
    assert runner.grammar.grammar_bitmask[:, 0].tolist() == [0, 1, 2, 3, 4, 6]


def test_a_grammar_is_shown_the_drafts_of_its_own_request() -> None:
    """Also when a request before it has left the batch since, and rows were moved up."""
    runner: Any = Runner({"a": 2, "b": 4, "c": 4})
    over = overlap.Overlap(runner)
    runner.drafts = {"a": [1], "b": [2, 3], "c": []}
    runner.execute_model(scheduled(a=(10, 1, 2), b=(10, 1, 2), c=(10, 1, 2)))
    runner.sample_tokens(None)
    runner.execute_model(scheduled(b=(13, 4, 2), c=(13, 4, 2)))
    runner.rows[:] = ["c", "b"]
    shown = over.take_draft_token_ids()
    assert dict(zip(shown.req_ids, shown.draft_token_ids, strict=True)) == {"a": [1], "b": [2, 3], "c": []}


def test_drafts_are_taken_only_where_something_was_computed() -> None:
    runner: Any = Runner({})
    over = overlap.Overlap(runner)
    runner.drafts = {"a": [1]}
    runner.sample_tokens(None)
    assert over.take_draft_token_ids() is None


def engine(**changes: Any) -> SimpleNamespace:
    parallel = {"distributed_executor_backend": "mp", "tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel, data_parallel_size=1),
        model_config=SimpleNamespace(is_hybrid=False, is_encoder_decoder=False, enable_return_routed_experts=False),
        scheduler_config=SimpleNamespace(scheduler_cls=None, async_scheduling=False),
        kv_transfer_config=None,
        additional_config={overlap.KEY: True},
    )
    for name, value in changes.items():
        part, _, field_name = name.partition("__")
        setattr(getattr(config, part) if field_name else config, field_name or part, value)
    return config


def test_where_it_is_switched_on() -> None:
    config = engine()
    overlap.switch_on(config)
    assert config.scheduler_config.scheduler_cls == overlap.SCHEDULER and overlap.on(config)
    assert not config.scheduler_config.async_scheduling, "vLLM checks it again, and would refuse"
    unasked = engine(additional_config=None)
    overlap.switch_on(unasked)
    assert unasked.scheduler_config.scheduler_cls is None


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel_config__distributed_executor_backend": "uni"},
        {"parallel_config__tensor_parallel_size": 2},
        {"parallel_config__data_parallel_size": 2},
        {"scheduler_config__scheduler_cls": "mine.Scheduler"},
        {"kv_transfer_config": object()},
        {"model_config__is_hybrid": True},
        {"model_config__enable_return_routed_experts": True},
    ],
)
def test_where_it_is_not(changes: dict[str, Any]) -> None:
    config = engine(**changes)
    before = config.scheduler_config.scheduler_cls
    overlap.switch_on(config)
    assert config.scheduler_config.scheduler_cls == before and not overlap.on(config)


@pytest.mark.parametrize(("given", "wanted"), [(None, True), (True, True), (False, False)])
def test_the_users_word_counts(given: bool | None, wanted: bool) -> None:
    args = SimpleNamespace(async_scheduling=given, additional_config={})
    overlap.want(args)
    assert args.async_scheduling is False, "vLLM would refuse it together with our drafter"
    assert overlap.on(args) is wanted
