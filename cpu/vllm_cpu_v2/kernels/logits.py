"""What changes logits before a draw: penalties, biases, bad words, grammar masks; and the count of NaNs."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

NEG_INF = float("-inf")


def unpack_bits(words: np.ndarray, length: int) -> np.ndarray:
    """Bits of int32 words, lowest first: bool [..., length]."""
    bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")
    return bits[..., :length].view(np.bool_)


def penalties(
    logits: torch.Tensor,  # [num_logits, vocab_size], in and out
    logits_stride: int,
    expanded_idx_mapping: torch.Tensor,  # [num_logits]
    token_ids: torch.Tensor,  # [num_logits] tokens fed at the rows; a row's draft tokens follow its request's first row
    expanded_local_pos: torch.Tensor,  # [num_logits]
    repetition_penalty: torch.Tensor,  # [max_num_reqs]
    frequency_penalty: torch.Tensor,  # [max_num_reqs]
    presence_penalty: torch.Tensor,  # [max_num_reqs]
    prompt_bin_mask: torch.Tensor,  # [max_num_reqs, ceil(vocab_size / 32)]
    prompt_bin_mask_stride: int,
    output_bin_counts: torch.Tensor,  # [max_num_reqs, vocab_size]
    output_bin_counts_stride: int,
    vocab_size: int,
    **_: object,
) -> None:
    """Apply repetition, frequency and presence penalties; draft tokens before a row count as its output."""
    idx = expanded_idx_mapping.numpy()
    repetition, frequency, presence = (
        p.numpy()[idx] for p in (repetition_penalty, frequency_penalty, presence_penalty)
    )
    rows = np.flatnonzero((repetition != 1) | (frequency != 0) | (presence != 0))
    if not rows.size:
        return
    slots = idx[rows]
    counts = output_bin_counts.numpy()[slots, :vocab_size]
    fed, local = token_ids.numpy(), expanded_local_pos.numpy()[rows]
    for i in np.flatnonzero(local).tolist():
        start = rows[i] - local[i]
        drafts = fed[start + 1 : rows[i] + 1]
        np.add.at(counts[i], drafts[(drafts >= 0) & (drafts < vocab_size)], 1)
    chosen = torch.from_numpy(rows)
    values = logits[chosen].float()
    seen = counts > 0
    repeated = torch.from_numpy(seen | unpack_bits(prompt_bin_mask.numpy()[slots], vocab_size))
    scale = torch.where(repeated, torch.from_numpy(repetition[rows])[:, None], torch.ones(()))
    values *= torch.where(values > 0, 1.0 / scale, scale)
    values -= torch.from_numpy(frequency[rows])[:, None] * torch.from_numpy(counts)
    values -= torch.from_numpy(presence[rows])[:, None] * torch.from_numpy(seen)
    logits[chosen] = values.to(logits.dtype)


def bincount(
    idx_mapping: torch.Tensor,  # [num_new_reqs]
    all_token_ids: torch.Tensor,  # [max_num_reqs, max_model_len]
    all_token_ids_stride: int,
    prompt_len: torch.Tensor,  # [max_num_reqs]
    prefill_len: torch.Tensor,  # [max_num_reqs]
    prompt_bin_mask: torch.Tensor,  # [max_num_reqs, ceil(vocab_size / 32)], in and out
    prompt_bin_mask_stride: int,
    output_bin_counts: torch.Tensor,  # [max_num_reqs, vocab_size], in and out
    output_bin_counts_stride: int,
    **_: object,
) -> None:
    """Mark the prompt's tokens and count the output's tokens of requests that join."""
    tokens, masks, counts = all_token_ids.numpy(), prompt_bin_mask.numpy(), output_bin_counts.numpy()
    for slot in idx_mapping.tolist():
        prompt, prefill = int(prompt_len[slot]), int(prefill_len[slot])
        present = np.zeros(masks.shape[1] * 32, dtype=np.uint8)
        present[tokens[slot, : min(prompt, prefill)]] = 1
        masks[slot] |= np.packbits(present, bitorder="little").view(np.int32)
        if prefill > prompt:
            np.add.at(counts[slot], tokens[slot, prompt:prefill], 1)


def bias(
    logits: torch.Tensor,  # [num_logits, vocab_size], in and out
    logits_stride: int,
    vocab_size: int,
    expanded_idx_mapping: torch.Tensor,  # [num_logits]
    num_allowed_token_ids: torch.Tensor,  # [max_num_reqs]
    allowed_token_ids: torch.Tensor,  # [max_num_reqs, max_allowed]
    allowed_token_ids_stride: int,
    num_logit_bias: torch.Tensor,  # [max_num_reqs]
    bias_token_ids: torch.Tensor,  # [max_num_reqs, max_biases]
    bias_token_ids_stride: int,
    biases: torch.Tensor,  # [max_num_reqs, max_biases]
    bias_stride: int,
    pos: torch.Tensor,  # [num_logits]
    min_lens: torch.Tensor,  # [max_num_reqs]
    num_stop_token_ids: torch.Tensor,  # [max_num_reqs]
    restore_when_all_masked: torch.Tensor,  # [max_num_reqs]
    stop_token_ids: torch.Tensor,  # [max_num_reqs, max_stops]
    stop_token_ids_stride: int,
    CHECK_ALL_MASKED_ROWS: bool,  # noqa: N803
    **_: object,
) -> None:
    """Apply allowed tokens, logit biases and min_tokens, in this order."""
    idx = expanded_idx_mapping.numpy()
    allowed, biased, stops = (c.numpy()[idx] for c in (num_allowed_token_ids, num_logit_bias, num_stop_token_ids))
    short = (stops > 0) & (pos.numpy() + 1 < min_lens.numpy()[idx])
    for i in np.flatnonzero((allowed > 0) | (biased > 0) | short).tolist():
        row, slot = logits[i], int(idx[i])
        if allowed[i]:
            ids = allowed_token_ids[slot, : int(allowed[i])].long()
            kept = row[ids]
            row.fill_(NEG_INF)
            row[ids] = kept
        if biased[i]:
            ids = bias_token_ids[slot, : int(biased[i])].long()
            row[ids] = (row[ids] + biases[slot, : int(biased[i])]).to(row.dtype)
        if short[i]:
            ids = stop_token_ids[slot, : int(stops[i])].long()
            before = row[ids]
            row[ids] = NEG_INF
            if CHECK_ALL_MASKED_ROWS and restore_when_all_masked[slot] and bool(row.max() == NEG_INF):
                finite = before.isfinite()
                row[ids[finite]] = before[finite]


def bad_words(
    logits: torch.Tensor,  # [num_logits, vocab_size], in and out
    logits_stride: int,
    expanded_idx_mapping: torch.Tensor,  # [num_logits]
    bad_word_token_ids: torch.Tensor,  # [max_num_reqs, max_total_tokens]
    bad_word_token_ids_stride: int,
    bad_word_offsets: torch.Tensor,  # [max_num_reqs, max_words + 1]
    bad_word_offsets_stride: int,
    num_bad_words: torch.Tensor,  # [max_num_reqs]
    all_token_ids: torch.Tensor,  # [max_num_reqs, max_model_len]
    all_token_ids_stride: int,
    prompt_len: torch.Tensor,  # [max_num_reqs]
    total_len: torch.Tensor,  # [max_num_reqs]
    input_ids: torch.Tensor,  # [num_logits]
    expanded_local_pos: torch.Tensor,  # [num_logits]
    **_: object,
) -> None:
    """Mask the last token of every bad word whose other tokens the row's output (with its drafts) ends in."""
    idx, local, fed = expanded_idx_mapping.numpy(), expanded_local_pos.numpy(), input_ids.numpy()
    words, offsets, history = bad_word_token_ids.numpy(), bad_word_offsets.numpy(), all_token_ids.numpy()
    for i in np.flatnonzero(num_bad_words.numpy()[idx]).tolist():
        slot, drafts = idx[i], int(local[i])
        ends = offsets[slot, : int(num_bad_words[slot]) + 1].tolist()
        longest = max(b - a for a, b in pairwise(ends)) - 1
        prompt, total = int(prompt_len[slot]), int(total_len[slot])
        tail = history[slot, max(prompt, total - longest) : total].tolist()
        tail += fed[i - drafts + 1 : i + 1].tolist()
        for start, end in pairwise(ends):
            word = words[slot, start:end].tolist()
            prefix = word[:-1]
            if len(prefix) <= len(tail) and tail[len(tail) - len(prefix) :] == prefix:
                logits[i, word[-1]] = NEG_INF


def apply_grammar_bitmask(
    logits: torch.Tensor,  # [num_logits, vocab_size], in and out
    logits_stride: int,
    logits_indices: torch.Tensor,  # [num_masks] request * MASK_STRIDE + position in the request
    cu_num_logits: torch.Tensor,  # [num_reqs + 1]
    bitmask: torch.Tensor,  # [num_masks, ceil(vocab_size / 32)], bit 1: allowed
    bitmask_stride: int,
    vocab_size: int,
    MASK_STRIDE: int,  # noqa: N803
    **_: object,
) -> None:
    """Mask the tokens that the grammar does not allow."""
    request, position = np.divmod(logits_indices.numpy(), MASK_STRIDE)
    cu = cu_num_logits.numpy()
    rows = cu[request] + position
    active = np.flatnonzero(rows < cu[request + 1])
    forbidden = ~unpack_bits(bitmask.numpy()[active], vocab_size)
    masks = torch.from_numpy(forbidden)
    for i, row in enumerate(rows[active].tolist()):
        logits[row, : forbidden.shape[1]].masked_fill_(masks[i], NEG_INF)


def num_nans(
    logits: torch.Tensor,  # [num_logits, vocab_size]
    logits_stride: int,
    counts: torch.Tensor,  # [num_logits], out
    vocab_size: int,
    **_: object,
) -> None:
    """Count the NaNs of every row."""
    counts.copy_(logits.isnan().sum(-1))
