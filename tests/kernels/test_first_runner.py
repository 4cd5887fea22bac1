"""vLLM's first model runner as benchmarks run it: on a CPU it would sample another distribution."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.v1.sample import rejection_sampler  # noqa: E402

from benchmarks import engines  # noqa: E402


def test_every_draft_token_has_its_requests_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", rejection_sampler.expand_batch_to_tokens)
    engines._expand_right(None)
    given, ends = torch.tensor([0.75, 0.0, 1.5]), torch.tensor([2, 3, 5])
    expanded = rejection_sampler.expand_batch_to_tokens(given, ends, 5, replace_from=0, replace_to=1)
    assert expanded.tolist() == [0.75, 0.75, 1.0, 1.5, 1.5] and expanded.dtype == given.dtype
    top_k = torch.tensor([5, 7], dtype=torch.int32)
    expanded = rejection_sampler.expand_batch_to_tokens(top_k, torch.tensor([0, 2]), 2)
    assert expanded.tolist() == [7, 7] and expanded.dtype == top_k.dtype  # a request without draft tokens
