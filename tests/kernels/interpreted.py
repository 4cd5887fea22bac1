"""Random batches for each CPU implementation and its Triton kernel in Triton's interpreter, and their comparison.

Needs Triton and a CPU backend for it on PYTHONPATH, and TRITON_INTERPRET=1; without them, who imports this is skipped.
"""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs Triton's interpreter: set TRITON_INTERPRET=1", allow_module_level=True)
from vllm.triton_utils import HAS_TRITON

if not HAS_TRITON:
    pytest.skip("needs Triton with a CPU backend on PYTHONPATH", allow_module_level=True)

import vllm.v1.worker.cpu.shm  # noqa: F401  before V2's modules
from vllm.triton_utils.dispatcher import KernelOverride
from vllm_cpu_v2.kernels import GPU, KERNELS

SLOTS, LENGTH, VOCAB, K = 11, 40, 300, 3


def both(monkeypatch: pytest.MonkeyPatch, name: str, run: Callable[[Any, Any], Any], state: Any) -> tuple[Any, Any]:
    """(result, state after) of `run(module, state)` with vLLM's kernels and with ours."""
    module = importlib.import_module(f"{GPU}.{name}")
    results = []
    for ours in (False, True):
        mine = copy.deepcopy(state)
        with monkeypatch.context() as patch:
            if ours:
                for full, implementation in KERNELS.items():
                    host, kernel = full.rsplit(".", 1)
                    loaded = importlib.import_module(host)
                    patch.setattr(loaded, kernel, KernelOverride(getattr(loaded, kernel), implementation))
            result = run(module, mine)
        results.append((result, vars(mine) if isinstance(mine, SimpleNamespace) else mine))
    return results[0], results[1]


def assert_same(left: Any, right: Any, **tolerance: float) -> None:
    if isinstance(left, torch.Tensor):
        if left.is_floating_point() and tolerance:
            torch.testing.assert_close(left, right, equal_nan=True, **tolerance)
        else:
            assert torch.equal(left, right), (left, right)
    elif isinstance(left, dict):
        for key in left:
            assert_same(left[key], right[key], **tolerance)
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_same(a, b, **tolerance)


def batch(rng: np.random.Generator, n: int = 5, drafts: bool = True) -> SimpleNamespace:
    """A batch of n requests: some in their prompt, some decoding, with 0..K drafts each."""
    idx = rng.permutation(SLOTS)[:n]
    prefill = rng.integers(3, 15, SLOTS).astype(np.int32)
    computed = rng.integers(0, 20, SLOTS).astype(np.int32)
    num_drafts = rng.integers(0, K + 1, n) if drafts else np.zeros(n, dtype=int)
    num_drafts[computed[idx] < prefill[idx]] = 0
    query = np.where(computed[idx] < prefill[idx], np.minimum(prefill[idx] - computed[idx], 4), 1 + num_drafts)
    starts = np.concatenate([[0], np.cumsum(query)]).astype(np.int32)
    cu = np.concatenate([[0], np.cumsum(1 + num_drafts)]).astype(np.int32)
    total, logits = int(starts[-1]), int(cu[-1])
    make = torch.from_numpy
    return SimpleNamespace(
        idx_mapping=make(idx.astype(np.int64)),
        query_start_loc=make(starts),
        cu_num_logits=make(cu),
        seq_lens=make(np.pad((computed[idx] + query), (0, SLOTS - n)).astype(np.int32)),
        prefill_len=make(prefill),
        num_computed=make(computed),
        total_len=make(np.maximum(computed, prefill)),
        all_token_ids=make(rng.integers(0, VOCAB, (SLOTS, LENGTH)).astype(np.int32)),
        input_ids=make(rng.integers(0, VOCAB, total).astype(np.int32)),
        positions=make(np.repeat(computed[idx], query) + np.arange(total) - np.repeat(starts[:-1], query)),
        last_sampled=make(rng.integers(0, VOCAB, (SLOTS, 1))),
        draft_tokens=make(rng.integers(0, VOCAB, (SLOTS, K))),
        logits_indices=make(np.repeat(starts[1:] - (1 + num_drafts) - cu[:-1], 1 + num_drafts) + np.arange(logits)),
        expanded=make(np.repeat(idx, 1 + num_drafts)),
        local=make((np.arange(logits) - np.repeat(cu[:-1], 1 + num_drafts)).astype(np.int32)),
        logits=make(rng.normal(0, 3, (logits, VOCAB)).astype(np.float32)),
        temperature=make(rng.choice([0.0, 1.0, 0.7], SLOTS).astype(np.float32)),
        seeds=make(rng.integers(-(2**63), 2**63 - 1, SLOTS)),
        num_logits=logits,
        total=total,
        n=n,
    )
