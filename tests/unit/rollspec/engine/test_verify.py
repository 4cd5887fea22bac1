"""Coupled verification that fails: all ranks leave it to vLLM at the same step, whichever of them it failed on."""

from __future__ import annotations

import functools

import pytest
from vllm_like import like

torch = pytest.importorskip("torch")

from other_rank import Others  # noqa: E402

from rollspec.engine.vllm.v2 import verify  # noqa: E402


def test_a_fault_of_another_rank_ends_coupled_verification_on_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "verify", lambda *_: "coupled")
    sampler = like(
        "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler", sampler=None, num_speculative_steps=4
    )
    ranks, faults = Others(), list[BaseException]()
    verification = verify.Verification(sampler, lambda: True, faults.append, ranks)
    step = functools.partial(verification.around, lambda **_: "standard", draft_logits=None)
    assert step() == "coupled" and not verification.broken
    ranks.other = 0
    assert step() == "standard" and verification.broken
    ranks.other = 1
    assert step() == "standard", "it stays so"
    assert [str(fault) for fault in faults] == ["it failed on another rank of the engine"]
