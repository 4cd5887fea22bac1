"""Each CPU implementation against its Triton kernel in Triton's interpreter, on random inputs.

Needs Triton and a CPU backend for it on PYTHONPATH, and TRITON_INTERPRET=1.
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
from vllm.triton_utils import HAS_TRITON, tl

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


@pytest.fixture(params=range(6))
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    return np.random.default_rng(request.param)


def test_staged_writes(monkeypatch, rng):
    def run(module, s):
        t = module.StagedWriteTensor((SLOTS, LENGTH), torch.int32, torch.device("cpu"))
        for row, start, values in s:
            t.stage_write(row, start, values)
        t.apply_write()
        return t.gpu

    for longest in (1, 9):
        writes = [
            (int(r), int(rng.integers(0, 20)), rng.integers(1, 99, rng.integers(1, longest + 1)).tolist())
            for r in rng.permutation(SLOTS)[:6]
        ]
        (left, _), (right, _) = both(monkeypatch, "buffer_utils", run, writes)
        assert_same(left, right)


@pytest.mark.parametrize("groups", [1, 2])
def test_block_tables(monkeypatch, rng, groups):
    def run(module, s):
        tables = module.BlockTables([4, 8][:groups], SLOTS, 64, [12, 6][:groups], torch.device("cpu"))
        for slot in range(SLOTS):
            tables.append_block_ids(slot, tuple([slot * 20 + i for i in range(g)] for g in (12, 6)[:groups]), True)
        tables.apply_staged_writes()
        first = [t.clone() for t in tables.gather_block_tables(torch.arange(SLOTS), SLOTS)]
        gathered = tables.gather_block_tables(s.idx_mapping, s.n)
        slots = tables.compute_slot_mappings(s.idx_mapping, s.query_start_loc, s.positions, 64)
        return first, list(gathered), slots

    s = batch(rng)
    (left, _), (right, _) = both(monkeypatch, "block_table", run, s)
    assert_same(left, right)


def test_batch_inputs(monkeypatch, rng):
    def run(module, s):
        following, seq_lens = torch.full((2, SLOTS), -7, dtype=torch.int32), torch.full((SLOTS,), 9, dtype=torch.int32)
        positions = torch.zeros_like(s.positions)
        module.prepare_prefill_inputs(
            s.input_ids, following, s.idx_mapping, s.query_start_loc, s.all_token_ids, s.prefill_len, s.num_computed
        )
        module.prepare_pos_seq_lens(s.idx_mapping, s.query_start_loc, s.num_computed, positions, seq_lens)
        indices = module.combine_sampled_and_draft_tokens(
            s.input_ids, s.idx_mapping, s.last_sampled, s.query_start_loc, seq_lens, s.prefill_len, s.draft_tokens,
            s.cu_num_logits, s.num_logits,
        )  # fmt: skip
        expanded = module.expand_idx_mapping(s.idx_mapping, s.num_logits, s.cu_num_logits, K + 1)
        return following, seq_lens, positions, indices, expanded

    left, right = both(monkeypatch, "input_batch", run, batch(rng))
    assert_same(left, right)


def test_after_the_step(monkeypatch, rng):
    def run(module, s):
        sampled, rejected = module.get_num_sampled_and_rejected(
            s.num_sampled, s.seq_lens, s.cu_num_logits, s.idx_mapping, s.prefill_len
        )
        s.idx_mapping[0] = -1 if s.skip else s.idx_mapping[0]
        module.post_update(
            s.idx_mapping, s.num_computed, s.last_sampled, s.bins, s.sampled, sampled, rejected, s.query_start_loc,
            s.all_token_ids, s.total_len,
        )  # fmt: skip
        if not s.skip:
            module.post_update_num_computed_tokens(s.idx_mapping, s.num_computed, s.query_start_loc)
        return sampled, rejected

    for skip in (False, True):
        s = batch(rng)
        s.skip, s.bins = skip, torch.zeros(SLOTS, VOCAB, dtype=torch.int32)
        s.sampled = torch.from_numpy(rng.integers(0, VOCAB, (s.n, K + 1)))
        s.num_sampled = torch.from_numpy(rng.integers(1, np.diff(s.cu_num_logits.numpy()) + 1).astype(np.int32))
        left, right = both(monkeypatch, "input_batch", run, s)
        assert_same(left, right)


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
        state = SimpleNamespace(token_ids=SimpleNamespace(gpu=s.own), num_token_ids=SimpleNamespace(gpu=s.counts))
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


def test_ngram(monkeypatch, rng):
    def run(module, s):
        scratch, drafts = torch.zeros(s.n, 3, dtype=torch.int64), torch.zeros(s.n, K, dtype=torch.int64)
        module._ngram_scan_kernel[(s.n, 3)](
            s.all_token_ids, LENGTH, s.idx_mapping, s.total_len, s.num_sampled, scratch, 3, LENGTH, 2, 4, 4, 16
        )
        module._ngram_finalize_kernel[(s.n,)](
            s.all_token_ids, LENGTH, s.idx_mapping, s.total_len, s.num_sampled, s.last_sampled.view(-1), scratch, 3,
            drafts, LENGTH, 3, K, 4, 4,
        )  # fmt: skip
        return scratch.amax(1), drafts

    s = batch(rng)
    s.all_token_ids %= 3
    s.total_len += 12
    s.num_sampled = torch.from_numpy(rng.integers(0, 3, s.n).astype(np.int32))
    left, right = both(monkeypatch, "spec_decode.ngram.speculator", run, s)
    assert_same(left, right)


@pytest.mark.parametrize("flat", [False, True])
def test_draft_head_inputs(monkeypatch, rng, flat):
    def run(module, s):
        buffers = importlib.import_module(f"{GPU}.input_batch").InputBuffers(SLOTS, 64, torch.device("cpu"))
        last, step, src = torch.ones(SLOTS, dtype=torch.int64), torch.tensor(5), torch.arange(SLOTS)
        module.prepare_prefill_inputs(
            last, step, buffers, s, s.num_sampled, s.num_rejected, s.last_sampled, s.following, SLOTS
        )
        before = {k: v.clone() for k, v in vars(buffers).items() if isinstance(v, torch.Tensor)}
        accepted = torch.cat([torch.arange(int(a), int(b) - int(r)) for a, b, r in zip(
            s.query_start_loc[:-1], s.query_start_loc[1:], s.num_rejected, strict=True)])  # fmt: skip
        before["input_ids"], before["positions"] = before["input_ids"][accepted], before["positions"][accepted]
        buffers.positions[: s.n] = torch.arange(s.n) + 30
        drafts, kept = s.draft_tokens[: s.n].clone(), torch.zeros(SLOTS, K, dtype=torch.int64)
        module.prepare_decode_inputs(
            drafts[:, 0].contiguous() if flat else drafts, s.seq_lens, s.num_rejected, buffers, src, 33, SLOTS
        )
        following = torch.zeros(SLOTS, 8)
        for i in (1, 2):
            module.update_draft_inputs(
                drafts[:, i].contiguous(), torch.tensor(i), s.hidden, kept, following, buffers, src, s.n, 33, K
            )
        names = ("query_start_loc", "seq_lens")
        decode = [getattr(buffers, x) for x in names] + [buffers.input_ids[: s.n], buffers.positions[: s.n]]
        return last, step, before, decode, src, kept, following

    s = batch(rng)
    counts = np.diff(s.cu_num_logits.numpy())
    s.num_sampled = torch.from_numpy(rng.integers(0, 2, s.n).astype(np.int32))
    s.num_rejected = torch.from_numpy(rng.integers(0, counts).astype(np.int32))
    s.following = torch.from_numpy(rng.integers(0, VOCAB, SLOTS).astype(np.int32))
    s.hidden = torch.randn(s.n, 8)
    s.num_reqs = s.n
    left, right = both(monkeypatch, "spec_decode.target_dependent_ar.speculator", run, s)
    assert_same(left[0], right[0])


def test_draft_model_inputs(monkeypatch, rng):
    def run(module, s):
        buffers = importlib.import_module(f"{GPU}.input_batch").InputBuffers(SLOTS, 64, torch.device("cpu"))
        ids, positions = torch.zeros(80, dtype=torch.int32), torch.zeros(80, dtype=torch.int64)
        last = torch.ones(SLOTS, dtype=torch.int64)
        total = module.prepare_prefill_inputs(
            buffers, s, s.last_sampled, s.num_rejected, ids, positions, last, SLOTS, 18
        )
        return total, ids, positions, last, buffers.query_start_loc, buffers.seq_lens

    s = batch(rng)
    s.num_rejected = torch.from_numpy(rng.integers(0, np.diff(s.cu_num_logits.numpy())).astype(np.int32))
    s.num_reqs, s.num_tokens, s.query_start_loc_np = s.n, s.total, s.query_start_loc.numpy()
    left, right = both(monkeypatch, "spec_decode.standalone_ar.speculator", run, s)
    assert_same(left[0], right[0])
