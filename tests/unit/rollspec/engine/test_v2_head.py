"""What stands around the second runner's sampler and log-probs where a head or old responses are at work."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllm_like import like

torch = pytest.importorskip("torch")

from rollspec.engine.vllm.v2.layers import _without_last  # noqa: E402
from rollspec.engine.vllm.v2.max_acceptance import MaxAcceptance  # noqa: E402
from rollspec.engine.vllm.v2.scoring import score_prompts  # noqa: E402
from rollspec.sampling.scoring import asked  # noqa: E402

BATCH = "vllm.v1.worker.gpu.input_batch:InputBatch"
TENSOR = "vllm.v1.worker.gpu.buffer_utils:UvaBackedTensor"


def asks(temperature: float | None) -> Any:
    extra = {"rollspec": {"score_temperature": temperature}} if temperature else None
    return like(
        "rollspec.engine.vllm.v2.adapter:ScheduledRequest",
        sampling_params=like("vllm:SamplingParams", extra_args=extra),
    )


@pytest.mark.parametrize("chunk", [2, 3, 100])
def test_each_row_is_scored_at_its_requests_temperature(chunk: int) -> None:
    hidden, head = torch.randn(9, 4), torch.randn(4, 11)
    running = {"a": asks(0.7), "b": asks(None), "c": asks(2.0)}
    batch = like(BATCH, req_ids=["a", "b", "c"], query_start_loc_np=np.array([0, 4, 5, 9, 9]))
    seen: list[Any] = []

    def compute(logits_of: Any, states: Any, given: Any, *rest: Any) -> str:
        assert given is batch and rest == (1,)
        seen.append(torch.cat([logits_of(states[i : i + chunk]) for i in range(0, len(states), chunk)]))
        return "out"

    assert score_prompts(running, compute, lambda x: x @ head, hidden, batch, 1) == "out"
    each = torch.tensor([0.7] * 4 + [1.0] + [2.0] * 4)[:, None]
    torch.testing.assert_close(seen[0], hidden @ head / each)


def test_a_step_without_such_a_request_is_vllms_own() -> None:
    given: list[Any] = []
    logits_of = object()
    batch = like(BATCH, req_ids=["a", "gone"], query_start_loc_np=np.array([0, 1, 2]))
    score_prompts({"a": asks(None)}, lambda f, *rest: given.append(f), logits_of, torch.zeros(2, 4), batch)  # type: ignore[arg-type]
    assert given == [logits_of]


@pytest.mark.parametrize("extra", [None, {}, {"rollspec": None}, {"rollspec": 3}, {"other": {}}])
def test_requests_without_settings_have_none(extra: Any) -> None:
    assert asked(like("vllm:SamplingParams", extra_args=extra)) == {} == asked(None)


def runner(temperature: list[float], cut: bool = False) -> Any:
    states = like(
        "vllm.v1.worker.gpu.sample.states:SamplingStates",
        temperature=like(TENSOR, gpu=torch.tensor(temperature)),
        vocab_size=7,
        top_k=like(TENSOR, np=np.array([7, 1 if cut else 7])),
        top_p=like(TENSOR, np=np.array([1.0, 1.0])),
    )
    return like(
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner",
        sampler=like("vllm.v1.worker.gpu.sample.sampler:Sampler", sampling_states=states),
        req_states=like("vllm.v1.worker.gpu.states:RequestState", index_to_req_id={0: "a", 1: "b"}),
    )


def look(measure: MaxAcceptance, logits: Any, emitted: list[int], skip: bool = False) -> None:
    rows = torch.tensor([0, 0, 0, 1])

    def sample() -> Any:
        kwargs = {"skip_top_k_top_p": True} if skip else {}
        out = measure.process(lambda x, *_, **__: x, logits, rows, torch.tensor([0, 1]), np.array([0, 1]), **kwargs)
        return out, torch.tensor(emitted), None

    measure.sample(sample)


def test_the_max_acceptance_is_of_the_rows_that_became_tokens() -> None:
    logits = 2.0 * torch.randn(4, 7)
    largest = logits.softmax(-1).max(-1).values
    measure = MaxAcceptance(runner([1.0, 0.0]), {"a": 2, "b": 0}.__getitem__)
    look(measure, logits, [2, 1])  # of `a` a draft was rejected; `b` is greedy: nothing caps its drafts
    assert measure.sums[1] == 3 and measure.sums[0] == pytest.approx(float(largest[0] + largest[1]) + 1.0)
    look(measure, logits, [3, 1])
    assert measure.sums[1] == 3, "one look in many steps"


def test_what_is_cut_after_the_look_is_left_out() -> None:
    measure = MaxAcceptance(runner([1.0, 1.0], cut=True), {"a": 2, "b": 0}.__getitem__)
    look(measure, torch.randn(4, 7), [1, 1], skip=True)
    assert measure.sums == [0.0, 0.0]
    look(measure, torch.randn(4, 7), [1, 1])
    assert measure.sums[1] == 2, "where it is cut before, it counts"


def test_the_head_does_not_see_the_layer_that_training_adds() -> None:
    aux = [torch.zeros(2, 3) + i for i in range(4)]
    seen: list[Any] = []

    def propose(*args: Any, **kwargs: Any) -> None:
        seen.append((args, kwargs))

    _without_last(3, propose, 0, 1, 2, 3, aux, 5, dummy_run=True)
    _without_last(3, propose, input_batch=0, aux_hidden_states=aux)  # as vLLM's dummy runs name them
    (args, kwargs), (none, named) = seen
    assert [int(a[0, 0]) for a in args[4]] == [0, 1, 2] and args[5:] == (5,) and kwargs == {"dummy_run": True}
    assert [int(a[0, 0]) for a in named["aux_hidden_states"]] == [0, 1, 2] and not none and named["input_batch"] == 0
