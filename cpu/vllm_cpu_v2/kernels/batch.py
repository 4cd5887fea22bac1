"""`input_batch`: the inputs of a step from the request state, and the request state after the step.

Names as in vLLM: `idx_mapping` maps a row of the batch to its slot in the request state, `query_start_loc` and
`cu_num_logits` are exclusive sums with one more element than the batch has requests.
"""

from __future__ import annotations

import numpy as np
import torch

from ..memory import arange


def prepare_prefill_inputs(
    input_ids: torch.Tensor,  # [num_tokens], out
    next_prefill_tokens: torch.Tensor,  # [num_lookahead, max_num_reqs], out
    next_prefill_tokens_stride: int,
    num_lookahead: int,
    idx_mapping: torch.Tensor,  # [num_reqs]
    query_start_loc: torch.Tensor,  # [num_reqs + 1]
    all_token_ids: torch.Tensor,  # [max_num_reqs, max_model_len]
    all_token_ids_stride: int,
    prefill_lens: torch.Tensor,  # [max_num_reqs]
    num_computed_tokens: torch.Tensor,  # [max_num_reqs]
    **_: object,
) -> None:
    """Copy the tokens of prefilling requests, and the tokens behind them that the next step starts with."""
    idx = idx_mapping.numpy()
    computed, lengths = num_computed_tokens.numpy()[idx], prefill_lens.numpy()[idx]
    rows = np.flatnonzero(computed < lengths)
    if not rows.size:
        return
    ids, following, tokens = input_ids.numpy(), next_prefill_tokens.numpy(), all_token_ids.numpy()
    starts = query_start_loc.numpy()
    for i in rows.tolist():
        slot, start, end, done = idx[i], starts[i], starts[i + 1], int(computed[i])
        row, behind = tokens[slot], done + int(end - start)
        ids[start:end] = row[done:behind]
        ahead = row[behind : min(behind + num_lookahead, int(lengths[i]))]
        following[: len(ahead), slot] = ahead
        following[len(ahead) : num_lookahead, slot] = 0


def prepare_pos_seq_lens(
    pos: torch.Tensor,  # [num_tokens], out
    seq_lens: torch.Tensor,  # [max_num_reqs], out
    idx_mapping: torch.Tensor,  # [num_reqs]
    query_start_loc: torch.Tensor,  # [num_reqs + 1]
    num_computed_tokens: torch.Tensor,  # [max_num_reqs]
    max_num_reqs: int,
    **_: object,
) -> None:
    """Write the position of every token and the length of every sequence; lengths behind the batch are 0."""
    n = len(idx_mapping)
    starts = query_start_loc.numpy()[: n + 1]
    lengths = starts[1:] - starts[:-1]
    computed = num_computed_tokens.numpy()[idx_mapping.numpy()]
    out = seq_lens.numpy()
    np.add(computed, lengths, out=out[:n])
    out[n:max_num_reqs] = 0
    total = int(starts[n])
    np.add(np.repeat(computed - starts[:-1], lengths), arange(total), out=pos.numpy()[:total])


def combine_sampled_and_draft_tokens(
    input_ids: torch.Tensor,  # [num_tokens], out
    idx_mapping: torch.Tensor,  # [num_reqs]
    last_sampled_tokens: torch.Tensor,  # [max_num_reqs, 1]
    query_start_loc: torch.Tensor,  # [num_reqs + 1]
    seq_lens: torch.Tensor,  # [num_reqs]
    prefill_len: torch.Tensor,  # [max_num_reqs]
    draft_tokens: torch.Tensor,  # [max_num_reqs, K]
    draft_tokens_stride: int,
    cu_num_logits: torch.Tensor,  # [num_reqs + 1]
    logits_indices: torch.Tensor,  # [num_logits], out
    NUM_NEW_SAMPLED_TOKENS: int = 1,  # noqa: N803
    **_: object,
) -> None:
    """Put the last sampled token and the draft tokens of decoding requests at the end of their queries."""
    n = len(idx_mapping)
    idx = idx_mapping.numpy()
    cu = cu_num_logits.numpy()[: n + 1]
    num_logits = cu[1:] - cu[:-1]
    ends = query_start_loc.numpy()[1 : n + 1]
    first = ends - num_logits
    total = int(cu[n])
    np.add(np.repeat(first - cu[:-1], num_logits), arange(total), out=logits_indices.numpy()[:total])

    lengths, prefill = seq_lens.numpy()[:n], prefill_len.numpy()[idx]
    generating = lengths > prefill
    ids = input_ids.numpy()
    if NUM_NEW_SAMPLED_TOKENS > 0:
        rows = generating & (lengths - num_logits >= prefill)
        ids[first[rows]] = last_sampled_tokens.view(-1).numpy()[idx[rows]]
    num_drafts = num_logits - NUM_NEW_SAMPLED_TOKENS
    if total == n * NUM_NEW_SAMPLED_TOKENS:
        return
    steps = arange(draft_tokens.shape[1])
    taken = (steps < num_drafts[:, None]) & generating[:, None]
    ids[((ends - num_drafts)[:, None] + steps)[taken]] = draft_tokens.numpy()[idx][taken]


def get_num_sampled_and_rejected(
    num_sampled: torch.Tensor,  # [num_reqs], in and out
    num_rejected: torch.Tensor,  # [num_reqs], out
    seq_lens: torch.Tensor,  # [num_reqs]
    cu_num_logits: torch.Tensor,  # [num_reqs + 1]
    idx_mapping: torch.Tensor,  # [num_reqs]
    prefill_len: torch.Tensor,  # [max_num_reqs]
    **_: object,
) -> None:
    """Rejected = logits - sampled; both are 0 for a request whose prompt is not done yet."""
    n = len(idx_mapping)
    sampled, rejected, cu = num_sampled.numpy(), num_rejected.numpy(), cu_num_logits.numpy()
    prefilling = seq_lens.numpy()[:n] < prefill_len.numpy()[idx_mapping.numpy()]
    sampled[:n][prefilling] = 0
    np.subtract(cu[1 : n + 1] - cu[:n], sampled[:n], out=rejected[:n])
    rejected[:n][prefilling] = 0


def post_update(
    idx_mapping: torch.Tensor,  # [num_reqs], negative: skip
    num_computed_tokens: torch.Tensor,  # [max_num_reqs], in and out
    last_sampled_tokens: torch.Tensor,  # [max_num_reqs, 1], out
    output_bin_counts: torch.Tensor | None,  # [max_num_reqs, vocab_size], in and out
    output_bin_counts_stride: int,
    sampled_tokens: torch.Tensor,  # [num_reqs, K + 1]
    sampled_tokens_stride: int,
    num_sampled: torch.Tensor,  # [num_reqs]
    num_rejected: torch.Tensor,  # [num_reqs]
    query_start_loc: torch.Tensor | None,  # [num_reqs + 1]
    all_token_ids: torch.Tensor,  # [max_num_reqs, max_model_len], out
    all_token_ids_stride: int,
    total_len: torch.Tensor,  # [max_num_reqs], in and out
    draft_tokens: torch.Tensor | None = None,  # [num_reqs, K], of another pipeline rank; from 0.33 on
    draft_tokens_out: torch.Tensor | None = None,  # [max_num_reqs, K], out
    num_draft_tokens: int = 0,
    **_: object,
) -> None:
    """Append the sampled tokens to their requests and advance the number of computed tokens."""
    n = len(idx_mapping)
    idx, tokens, counts = idx_mapping.numpy(), sampled_tokens.numpy()[:n], num_sampled.numpy()[:n]
    delta = -num_rejected.numpy()[:n]
    if query_start_loc is not None:
        starts = query_start_loc.numpy()[: n + 1]
        delta = delta + (starts[1:] - starts[:-1])
    real = idx >= 0
    if draft_tokens is not None and draft_tokens_out is not None:
        draft_tokens_out.numpy()[idx[real]] = draft_tokens.numpy()[:n][real]
    if not real.all():
        idx, tokens, counts, delta = idx[real], tokens[real], counts[real], delta[real]
    num_computed_tokens.numpy()[idx] += delta

    lengths, history = total_len.numpy(), all_token_ids.numpy()
    bins = None if output_bin_counts is None else output_bin_counts.numpy()
    last = last_sampled_tokens.view(-1).numpy()
    width = history.shape[1]
    for column in range(int(counts.max(initial=0))):  # slots are unique within a column
        rows = np.flatnonzero(counts > column)
        slots, sampled = idx[rows], tokens[rows, column]
        at = lengths[slots]
        inside = at < width
        history[slots[inside], at[inside]] = sampled[inside]
        lengths[slots] = at + 1
        last[slots] = sampled
        if bins is not None:
            bins[slots, sampled] += 1


def post_update_num_computed_tokens(
    idx_mapping: torch.Tensor,  # [num_reqs]
    num_computed_tokens: torch.Tensor,  # [max_num_reqs], in and out
    query_start_loc: torch.Tensor,  # [num_reqs + 1]
    **_: object,
) -> None:
    """Advance the number of computed tokens by the length of each query."""
    n = len(idx_mapping)
    num_computed_tokens.numpy()[idx_mapping.numpy()] += np.diff(query_start_loc.numpy()[: n + 1])


def expand_idx_mapping(
    idx_mapping: torch.Tensor,  # [num_reqs]
    expanded_idx_mapping: torch.Tensor,  # [num_logits], out
    expanded_local_pos: torch.Tensor,  # [num_logits], out
    cu_num_logits: torch.Tensor,  # [num_reqs + 1]
    **_: object,
) -> None:
    """Repeat the slot of every request once per logit, with the index of the logit within the request."""
    n = len(idx_mapping)
    cu = cu_num_logits.numpy()[: n + 1]
    num_logits = cu[1:] - cu[:-1]
    total = int(cu[n])
    expanded_idx_mapping.numpy()[:total] = np.repeat(idx_mapping.numpy(), num_logits)
    np.subtract(arange(total), np.repeat(cu[:-1], num_logits), out=expanded_local_pos.numpy()[:total], casting="unsafe")
