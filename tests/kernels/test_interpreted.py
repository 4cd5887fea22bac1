"""The CPU implementations around a step against their Triton kernels in Triton's interpreter, on random inputs."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
from interpreted import LENGTH, SLOTS, VOCAB, K, assert_same, batch, both
from vllm_cpu_v2.kernels import GPU


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
