"""Requests that are taken as ended before vLLM says so, while one more step of them may be on its way."""

from __future__ import annotations

import time
from typing import Any

import pytest
from vllm_like import like

pytest.importorskip("torch")

from rollspec import RollspecConfig
from rollspec.drafting.requests import StepResult
from rollspec.engine.bridge import Bridge
from rollspec.engine.operations import _collect
from rollspec.step import DraftEngine

NEW = "vllm.v1.core.sched.output:NewRequestData"


def result(*sampled: list[int]) -> StepResult:
    return StepResult(["a", "b"], list(sampled), {}, len(sampled), 0.0, 0.0)


def step(**scheduled: int) -> Any:
    return like(
        "vllm.v1.core.sched.output:SchedulerOutput",
        finished_req_ids=set(),
        scheduled_new_reqs=[],
        scheduled_spec_decode_tokens={},
        total_num_scheduled_tokens=sum(scheduled.values()),
    )


def around(p: DraftEngine, **more: Any) -> Any:
    """A bridge that drafts with `p`, and no step yet."""
    return like(
        "rollspec.engine.bridge:Bridge", engine=p, collected=set(), coupled=None, drafting=True, began=0.0, _ended=0.0,
        **more,
    )  # fmt: skip


def test_a_step_too_many_begins_no_request_anew() -> None:
    p = DraftEngine(RollspecConfig.load({}, env={}), 64)
    finished: list[tuple[str, bool]] = []
    capture = like(
        "rollspec.head.capture:Capture",
        finish=lambda req_id, request, scheduled=False: finished.append((req_id, scheduled)),
        stepped=lambda seconds: None,
    )
    bridge = around(
        p,
        running={"a": None, "b": None},
        head=like("rollspec.head.draft_head:DraftHead", capture=capture, before_step=lambda ended, computes: None),
        _scheduler_output=step(a=1, b=1),
    )
    begun: list[str] = []

    def begin(req_id: str) -> None:
        begun.append(req_id)
        p.begin(req_id, [1, 2], 3 if req_id == "a" else 30)

    bridge._begin = begin
    for _ in range(3):
        Bridge._prepare(bridge, result([5], [6]))
    assert Bridge.ended(bridge, "a") and not Bridge.ended(bridge, "b")
    _collect(bridge)
    assert finished == [("a", True)] and bridge.collected == {"a"} and "a" not in p.requests
    Bridge._prepare(bridge, result([7], [6]))
    assert begun == ["a", "b"] and Bridge.ended(bridge, "a")
    ((_, prompt),) = p.history
    assert [r.tokens.tolist() for r in prompt.responses] == [[5, 5, 5]]
    last = step(b=1)
    last.finished_req_ids = {"a"}
    Bridge.before_step(bridge, last)
    assert not bridge.collected, "its name may be given again"


def test_a_step_that_began_before_the_last_one_ended_says_nothing_of_what_steps_cost() -> None:
    timed: list[tuple[bool, float]] = []
    engine = like(
        "rollspec.step:DraftEngine",
        requests={"a": None},
        timed=lambda tokens, decode_only, seconds, batch: timed.append((decode_only, seconds)),
        prepare=lambda req_ids, sampled, scheduled, context_tokens: 0,
    )
    now = time.perf_counter()
    bridge: Any = like("rollspec.engine.bridge:Bridge", engine=engine, collected=set(), head=None, _ended=now - 1.0)
    Bridge._prepare(bridge, StepResult(["a"], [[5]], {}, 1, 8.0, now - 0.5))
    Bridge._prepare(bridge, StepResult(["a"], [[5]], {}, 1, 8.0, None))
    (alone, half), (among, whole) = timed
    assert alone and 0.5 <= half < 1.0 and not among and 1.0 <= whole < 2.0


def test_tokens_that_the_engine_drops_and_samples_again_are_in_the_history_once() -> None:
    p = DraftEngine(RollspecConfig.load({}, env={}), 64)
    bridge = around(p, running={"a": None}, head=None, _begin=lambda req_id: p.begin(req_id, [1, 2], 6, stop_ids=(9,)))
    bridge._forget_dropped = lambda request: Bridge._forget_dropped(bridge, request)

    def begins(**changes: Any) -> None:
        Bridge.before_step(bridge, like("vllm.v1.core.sched.output:SchedulerOutput", **vars(step(a=1)) | changes))

    for tokens in ([5], [6, 9]):  # the scheduler preempts it before it sees the last ones
        begins()
        Bridge._prepare(bridge, StepResult(["a"], [tokens], {}, 1, 8.0, 0.0))
    begins(scheduled_new_reqs=[like(NEW, req_id="a", prefill_token_ids=[1, 2, 5])])
    assert not Bridge.ended(bridge, "a"), "the stop token was dropped, too"
    Bridge._prepare(bridge, StepResult(["a"], [[6, 7]], {}, 4, 8.0, 0.0))
    begins(scheduled_new_reqs=[like(NEW, req_id="a", prefill_token_ids=[1, 2, 5, 6, 7])])  # nothing in flight
    Bridge._prepare(bridge, StepResult(["a"], [[8]], {}, 6, 8.0, 0.0))
    begins(finished_req_ids={"a"})
    ((_, prompt),) = p.history
    assert [r.tokens.tolist() for r in prompt.responses] == [[5, 6, 7, 8]]
