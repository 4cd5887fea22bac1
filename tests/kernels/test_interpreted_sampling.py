"""The CPU implementations of sampling against their Triton kernels in Triton's interpreter, on random inputs."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from interpreted import SLOTS, VOCAB, K, assert_same, batch, both
from vllm.triton_utils import tl
from vllm_cpu_v2.kernels import GPU
from vllm_like import like


@pytest.mark.parametrize("vocab", [VOCAB, 2500])
@pytest.mark.parametrize("fp64", [False, True])
@pytest.mark.parametrize("drafting", [False, True])
def test_gumbel_sample(monkeypatch, rng, vocab, fp64, drafting):
    def run(module, s):
        return module.gumbel_sample(
            s.logits, s.expanded, s.temperature, s.seeds, s.positions, drafting, drafting,
            s.cache if drafting else None, torch.tensor(1) if drafting else None, use_fp64=fp64,
        )  # fmt: skip

    s = batch(rng, drafts=False)
    s.logits = torch.from_numpy(rng.normal(0, 1, (s.n, vocab)).astype(np.float32))
    s.positions = torch.from_numpy(rng.integers(0, 1000, s.n))
    s.cache = torch.zeros(SLOTS, K, vocab)
    left, right = both(monkeypatch, "sample.gumbel", run, s)
    assert_same(left, right)


def test_gumbel_noise_is_identical(monkeypatch):
    """The noise itself, not only its argmax: the kernel's maximum over one token is that token's noise."""
    from vllm_cpu_v2.noise import gumbel

    module = importlib.import_module(f"{GPU}.sample.gumbel")
    seeds, positions, width = np.array([0, -5, 2**62 + 12345]), np.array([0, 17, 123456]), 400
    for fp64 in (False, True):
        found = np.zeros((3, width), dtype=np.float64 if fp64 else np.float32)
        for token in range(0, width, 7):
            local = torch.zeros(3, 1, dtype=torch.float64 if fp64 else torch.float32)
            logits = torch.full((3, width), float("-inf"))
            logits[:, token] = 0.0
            module._gumbel_sample_kernel[(3, 1)](
                torch.zeros(3, 1, dtype=torch.int64), 1, local, 1, None, 0, 0, None, None, 0, logits, width,
                torch.arange(3), torch.from_numpy(seeds), torch.from_numpy(positions), torch.ones(3), width,
                BLOCK_SIZE=1024, IS_DRAFTING=False, APPLY_TEMPERATURE=False, USE_FP64=fp64, PER_TOKEN_COL=False,
            )  # fmt: skip
            found[:, token] = local[:, 0].numpy()
        ours = gumbel(seeds, positions, width, fp64)
        assert np.array_equal(ours[:, ::7], found[:, ::7])


def test_temperature_min_p_penalties(monkeypatch, rng):
    def run(module, s):
        gumbel, min_p, penalties = (
            importlib.import_module(f"{GPU}.sample.{name}") for name in ("gumbel", "min_p", "penalties")
        )
        penalties.bincount(s.idx_mapping, s.all_token_ids, s.prompt, s.prefill_len, s.mask, s.bins, 20)
        penalties.apply_penalties(
            s.logits, s.expanded, s.fed, s.local, s.repetition, s.frequency, s.presence, s.mask, s.bins
        )
        gumbel.apply_temperature(s.logits, s.expanded, s.temperature)
        min_p.apply_min_p(s.logits, s.expanded, s.min_p)
        return s.logits

    s = batch(rng)
    s.prompt = (s.prefill_len - 2).clamp(min=1)
    s.mask = torch.zeros(SLOTS, (VOCAB + 31) // 32, dtype=torch.int32)
    s.bins = torch.zeros(SLOTS, VOCAB, dtype=torch.int32)
    s.fed = torch.from_numpy(rng.integers(0, VOCAB, s.num_logits).astype(np.int32))
    for name, values in (
        ("repetition", [1.0, 1.3]),
        ("frequency", [0.0, 0.4]),
        ("presence", [0.0, -0.5]),
        ("min_p", [0.0, 0.1]),
    ):
        setattr(s, name, torch.from_numpy(rng.choice(values, SLOTS).astype(np.float32)))
    left, right = both(monkeypatch, "sample.gumbel", run, s)
    assert_same(left, right, rtol=1e-6, atol=1e-6)


def test_biases_bad_words_and_grammar(monkeypatch, rng):
    def run(module, s):
        bias, bad, grammar = (
            importlib.import_module(f"{GPU}.{n}")
            for n in ("sample.logit_bias", "sample.bad_words", "structured_outputs")
        )
        bias.apply_logit_bias(
            s.logits, s.expanded, s.pos, s.num_allowed, s.ids, s.num_bias, s.ids, s.bias, s.min_lens, s.num_stops,
            s.restore, s.ids, True,
        )  # fmt: skip
        bad.apply_bad_words(
            s.logits, s.expanded, s.words, s.offsets, s.num_words, s.all_token_ids, s.prompt, s.total_len, s.fed,
            s.local, 2,
        )  # fmt: skip
        grammar._apply_grammar_bitmask_kernel[(len(s.masks), 1)](
            s.logits, s.logits.stride(0), s.rows, s.cu_num_logits, s.masks, s.masks.stride(0), VOCAB,
            MASK_STRIDE=K + 1, BLOCK_SIZE=8192,
        )  # fmt: skip
        return s.logits

    s = batch(rng)
    for name, high in (("num_allowed", 4), ("num_bias", 4), ("num_stops", 3), ("restore", 2), ("num_words", 3)):
        setattr(s, name, torch.from_numpy(rng.integers(0, high, SLOTS).astype(np.int32)))
    s.ids = torch.from_numpy(np.stack([rng.permutation(VOCAB)[:4] for _ in range(SLOTS)]).astype(np.int32))
    s.bias = torch.from_numpy(rng.normal(0, 2, (SLOTS, 4)).astype(np.float32))
    s.min_lens = torch.from_numpy(rng.integers(0, 30, SLOTS).astype(np.int32))
    s.pos = s.positions[s.logits_indices.long()]
    s.prompt = (s.prefill_len - 2).clamp(min=1)
    s.all_token_ids %= 3  # short cycles, so that prefixes do match
    s.fed = torch.from_numpy(rng.integers(0, 3, s.num_logits).astype(np.int32))
    s.words = torch.from_numpy(rng.integers(0, 3, (SLOTS, 8)).astype(np.int32))
    s.offsets = torch.tensor([[0, 2, 5]] * SLOTS, dtype=torch.int32)
    rows = [r * (K + 1) + p for r in range(s.n) for p in range(int(s.cu_num_logits[r + 1] - s.cu_num_logits[r]))]
    s.rows = torch.tensor(rows, dtype=torch.int32)
    s.masks = torch.from_numpy(rng.integers(-(2**31), 2**31 - 1, (len(rows), (VOCAB + 31) // 32)).astype(np.int32))
    left, right = both(monkeypatch, "sample.logit_bias", run, s)
    assert_same(left, right)


@pytest.mark.parametrize("num", [0, 4])
def test_logprobs(monkeypatch, rng, num):
    def run(module, s):
        scores = module.compute_topk_scores(s.logits, num, s.sampled)
        state = like(
            f"{GPU}.sample.logprob:LogprobTokenIdsState",
            token_ids=like(f"{GPU}.buffer_utils:StagedWriteTensor", gpu=s.own),
            num_token_ids=like(f"{GPU}.buffer_utils:UvaBackedTensor", gpu=s.counts),
        )
        own = module.compute_topk_scores(s.logits, num, s.sampled, None, state, s.expanded, 3)
        prompt = importlib.import_module(f"{GPU}.sample.prompt_logprob")
        ids = prompt.get_prompt_logprobs_token_ids(
            s.total, s.query_start_loc, s.idx_mapping, s.num_computed, s.all_token_ids
        )
        fields = ("logprob_token_ids", "logprobs", "selected_token_ranks")
        return [getattr(x, f) for x in (scores, own) for f in fields], ids

    s = batch(rng)
    s.sampled = torch.from_numpy(rng.integers(0, VOCAB, s.num_logits))
    s.own = torch.from_numpy(rng.integers(0, VOCAB, (SLOTS, 3)).astype(np.int32))
    s.counts = torch.from_numpy(rng.integers(0, 4, SLOTS).astype(np.int32))
    left, right = both(monkeypatch, "sample.logprob", run, s)
    assert_same(left, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("dense", [False, True])
def test_rejection(monkeypatch, rng, block, dense):
    def run(module, s):
        sampler = importlib.import_module(f"{GPU}.spec_decode.rejection_sampler")
        drafts, pos = sampler.gather_draft_sampled(
            s.input_ids, s.positions, s.logits_indices, s.expanded, s.local, s.prefill_len
        )
        sampled, num = module.rejection_sample(
            s.logits, s.draft_logits if dense else None, drafts, s.cu_num_logits, pos, s.idx_mapping, s.expanded,
            s.local, s.temperature, s.seeds, K, use_block_verification=block,
        )  # fmt: skip
        flat = torch.zeros(s.num_logits, dtype=torch.int64)
        sampler._flatten_sampled_kernel[(s.n,)](flat, sampled, sampled.stride(0), num, s.cu_num_logits)
        taken = torch.arange(K + 1) < num[:, None]
        return drafts, pos, torch.where(taken, sampled, 0), num, flat

    # The interpreter has no libdevice; the kernel takes log1p from there for the residual of dense drafts.
    utilities = importlib.import_module(f"{GPU}.spec_decode.rejection_sampler_utils")
    monkeypatch.setattr(utilities, "tldevice", SimpleNamespace(log1p=lambda x: tl.log(1.0 + x)))
    for _ in range(4):
        s = batch(rng, n=8)
        s.logits[:, 5:] -= 8.0  # a sharp target over few tokens, so that drafts are accepted and rejected
        s.input_ids %= 5
        s.draft_logits = torch.from_numpy(rng.normal(0, 2, (SLOTS, K, VOCAB)).astype(np.float32))
        s.draft_logits[:, :, 5:] -= 8.0
        left, right = both(monkeypatch, "spec_decode.rejection_sampler_utils", run, s)
        assert_same(left[0], right[0])
