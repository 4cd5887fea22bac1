"""Scoring at a temperature, around a stand-in for vLLM's model runner that loops over its requests as vLLM's does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rollspec.engine.vllm import scoring  # noqa: E402


class Runner:
    def __init__(self) -> None:
        self.sampler = SimpleNamespace(compute_logprobs=lambda logits: logits.log_softmax(-1))
        self.requests: dict[str, Any] = {}
        self.num_prompt_logprobs: dict[str, int] = {}
        self.logits = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
        self.calls = 0

    def add(self, name: str, extra: Any = None) -> None:
        self.requests[name] = SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra))
        self.num_prompt_logprobs[name] = 0

    def _get_prompt_logprobs_dict(self, hidden_states: Any, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
        self.calls += 1
        out, done = {}, []
        for name in self.num_prompt_logprobs:
            if name in num_scheduled_tokens:
                out[name] = self.sampler.compute_logprobs(self.logits)
                done.append(name)
        for name in done:
            del self.num_prompt_logprobs[name]
        return out


def asks(temperature: float) -> dict[str, Any]:
    return {"rollspec": {"score_temperature": temperature}}


def test_each_request_is_scored_at_its_own_temperature() -> None:
    runner = Runner()
    compute = runner.sampler.compute_logprobs
    scoring.install(runner)
    for name, extra in {"a": asks(0.7), "b": None, "c": asks(2.0), "d": asks(0.7), "later": asks(0.7)}.items():
        runner.add(name, extra)
    waiting = runner.num_prompt_logprobs
    out = runner._get_prompt_logprobs_dict(None, dict.fromkeys("abcd", 6))
    for name, temperature in {"a": 0.7, "b": 1.0, "c": 2.0, "d": 0.7}.items():
        assert torch.equal(out[name], (runner.logits / temperature).log_softmax(-1)), name
    assert runner.num_prompt_logprobs is waiting and waiting == {"later": 0}
    assert runner.sampler.compute_logprobs is compute


def test_steps_without_such_a_request_are_vllms_own() -> None:
    runner = Runner()
    scoring.install(runner)
    assert runner._get_prompt_logprobs_dict(None, {"x": 6}) == {} and runner.calls == 1
    runner.add("plain")
    runner.add("one", asks(1.0))
    out = runner._get_prompt_logprobs_dict(None, {"plain": 6, "one": 6})
    assert runner.calls == 2 and torch.equal(out["one"], runner.logits.log_softmax(-1))


def test_a_fault_leaves_nothing_changed() -> None:
    runner = Runner()
    compute = runner.sampler.compute_logprobs
    runner._get_prompt_logprobs_dict = lambda *args: 1 / 0  # type: ignore[method-assign]
    scoring.install(runner)
    runner.add("a", asks(0.7))
    waiting = runner.num_prompt_logprobs
    with pytest.raises(ZeroDivisionError):
        runner._get_prompt_logprobs_dict(None, {"a": 1})
    assert runner.num_prompt_logprobs is waiting == {"a": 0} and runner.sampler.compute_logprobs is compute


def test_another_model_runner_is_refused() -> None:
    with pytest.raises(AttributeError):
        scoring.install(SimpleNamespace())


@pytest.mark.parametrize("extra", [None, {}, {"rollspec": None}, {"rollspec": 3}, {"other": {}}])
def test_requests_without_settings_have_none(extra: Any) -> None:
    assert scoring.asked(SimpleNamespace(extra_args=extra)) == {} == scoring.asked(None)
