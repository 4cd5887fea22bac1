"""Inputs of draft heads (`target_dependent_ar`) and draft models (`standalone_ar`), from the verified batch."""

from __future__ import annotations

import numpy as np
import torch

from ..memory import arange


def prepare_prefill_inputs(
    last_token_indices: torch.Tensor,  # [max_num_reqs], out
    draft_current_step: torch.Tensor,  # scalar, out
    draft_input_ids: torch.Tensor,  # [max_num_tokens], out
    draft_positions: torch.Tensor,  # [max_num_tokens], out
    draft_query_start_loc: torch.Tensor,  # [max_num_reqs + 1], out
    draft_seq_lens: torch.Tensor,  # [max_num_reqs], out
    target_input_ids: torch.Tensor,  # [num_tokens]
    target_positions: torch.Tensor,  # [num_tokens]
    idx_mapping: torch.Tensor,  # [num_reqs]
    last_sampled: torch.Tensor,  # [max_num_reqs, 1]
    next_prefill_tokens: torch.Tensor,  # [max_num_reqs]
    num_sampled: torch.Tensor,  # [num_reqs]
    num_rejected: torch.Tensor,  # [num_reqs]
    query_start_loc: torch.Tensor,  # [num_reqs + 1]
    seq_lens: torch.Tensor,  # [num_reqs]
    max_num_reqs: int,
    **_: object,
) -> None:
    """Shift each query by one token and put the sampled (or next prompt) token behind its last accepted token.

    The kernel writes accepted rows only. Rows behind them take the target's values here, which are not read.
    """
    n = len(idx_mapping)
    idx, starts = idx_mapping.numpy(), query_start_loc.numpy()[: n + 1]
    total = int(starts[n])
    last = starts[1:] - num_rejected.numpy()[:n] - 1
    ids = draft_input_ids.numpy()
    ids[: total - 1] = target_input_ids.numpy()[1:total]
    ids[last] = np.where(
        num_sampled.numpy()[:n] > 0, last_sampled.view(-1).numpy()[idx], next_prefill_tokens.view(-1).numpy()[idx]
    )
    draft_positions.numpy()[:total] = target_positions.numpy()[:total]
    indices, lengths, offsets = last_token_indices.numpy(), draft_seq_lens.numpy(), draft_query_start_loc.numpy()
    indices[:n], indices[n:max_num_reqs] = last, 0
    lengths[:n], lengths[n:max_num_reqs] = seq_lens.numpy()[:n], 0
    offsets[: n + 1], offsets[n + 1 : max_num_reqs + 1] = starts, total
    draft_current_step.zero_()


def prepare_decode_inputs(
    draft_tokens: torch.Tensor,  # [num_reqs] or [num_reqs, K]
    draft_tokens_stride: int,
    target_seq_lens: torch.Tensor,  # [num_reqs]
    num_rejected: torch.Tensor,  # [num_reqs]
    input_ids: torch.Tensor,  # [max_num_tokens], out
    positions: torch.Tensor,  # [max_num_tokens], in and out
    sample_src_positions: torch.Tensor,  # [max_num_reqs], in and out
    query_start_loc: torch.Tensor,  # [max_num_reqs + 1], out
    seq_lens: torch.Tensor,  # [max_num_reqs], out
    max_model_len: int,
    max_num_reqs: int,
    ADVANCE_DRAFT_POSITIONS: bool,  # noqa: N803
    **_: object,
) -> None:
    """One token per request: the first draft, one position further, clamped to the model's length."""
    n = len(draft_tokens)
    input_ids.numpy()[:n] = draft_tokens.numpy().reshape(n, -1)[:, 0]
    sample_src_positions.numpy()[:n] += 1
    lengths = target_seq_lens.numpy()[:n] - num_rejected.numpy()[:n]
    if ADVANCE_DRAFT_POSITIONS:
        at = positions.numpy()
        np.minimum(at[:n] + 1, max_model_len - 1, out=at[:n])
        lengths = np.minimum(lengths + 1, max_model_len)
    out, starts = seq_lens.numpy(), query_start_loc.numpy()
    out[:n], out[n:max_num_reqs] = lengths, 0
    starts[: n + 1], starts[n + 1 : max_num_reqs + 1] = arange(n + 1), n


def update_draft_inputs(
    output_draft_tokens: torch.Tensor,  # [max_num_reqs, K], out
    output_draft_tokens_stride: int,
    next_input_hidden_states: torch.Tensor,  # [max_num_tokens, hidden_size], out
    next_input_hidden_states_stride: int,
    input_ids: torch.Tensor,  # [max_num_tokens], out
    positions: torch.Tensor,  # [max_num_tokens], in and out
    sample_src_positions: torch.Tensor,  # [max_num_reqs], in and out
    seq_lens: torch.Tensor,  # [max_num_reqs], in and out
    draft_tokens: torch.Tensor,  # [num_reqs]
    current_draft_step: torch.Tensor,  # scalar
    hidden_states: torch.Tensor,  # [num_tokens, hidden_size]
    hidden_states_stride: int,
    hidden_size: int,
    max_model_len: int,
    num_speculative_steps: int,
    ADVANCE_DRAFT_POSITIONS: bool,  # noqa: N803
    **_: object,
) -> None:
    """Keep the drafted tokens of this step and feed them to the next one, unless it is the last."""
    n, step = len(draft_tokens), int(current_draft_step)
    tokens = draft_tokens.numpy()
    output_draft_tokens.numpy()[:n, step] = tokens
    if step >= num_speculative_steps - 1:
        return
    sample_src_positions.numpy()[:n] += 1
    input_ids.numpy()[:n] = tokens
    next_input_hidden_states[:n, :hidden_size] = hidden_states[:n]
    if ADVANCE_DRAFT_POSITIONS:
        at, lengths = positions.numpy()[:n], seq_lens.numpy()[:n]
        np.minimum(at + 1, max_model_len - 1, out=at)
        np.minimum(lengths + 1, max_model_len, out=lengths)


def prepare_expanded_inputs(
    target_input_ids: torch.Tensor,  # [num_tokens]
    target_positions: torch.Tensor,  # [num_tokens]
    last_sampled: torch.Tensor,  # [max_num_reqs, 1]
    idx_mapping: torch.Tensor,  # [num_reqs]
    out_input_ids: torch.Tensor,  # [num_tokens + num_reqs], out
    out_positions: torch.Tensor,  # [num_tokens + num_reqs], out
    last_token_indices: torch.Tensor,  # [max_num_reqs], out
    out_query_start_loc: torch.Tensor,  # [max_num_reqs + 1], out
    out_seq_lens: torch.Tensor,  # [max_num_reqs], out
    query_start_loc: torch.Tensor,  # [num_reqs + 1]
    seq_lens: torch.Tensor,  # [num_reqs]
    num_rejected: torch.Tensor,  # [num_reqs]
    max_num_reqs: int,
    max_model_len: int,
    **_: object,
) -> None:
    """Each query with one more slot: accepted tokens, the sampled token, then zeros for rejected slots."""
    n = len(idx_mapping)
    starts = query_start_loc.numpy()[: n + 1]
    lengths = starts[1:] - starts[:-1]
    valid = lengths - num_rejected.numpy()[:n]
    out_starts = starts + arange(n + 1)
    total = int(out_starts[n])
    request = np.repeat(arange(n), lengths + 1)
    local = arange(total) - out_starts[:-1][request]
    source = np.minimum(starts[:-1][request] + local, len(target_input_ids) - 1)
    ids = np.where(local < valid[request], target_input_ids.numpy()[source], 0)
    ids[out_starts[:-1] + valid] = last_sampled.view(-1).numpy()[idx_mapping.numpy()]
    out_input_ids.numpy()[:total] = ids
    first = target_positions.numpy()[starts[:-1]]
    np.minimum(first[request] + local, max_model_len - 1, out=out_positions.numpy()[:total])
    indices, offsets, out_lens = last_token_indices.numpy(), out_query_start_loc.numpy(), out_seq_lens.numpy()
    indices[:n], indices[n:max_num_reqs] = out_starts[:-1] + valid, 0
    offsets[: n + 1], offsets[n + 1 : max_num_reqs + 1] = out_starts, total
    out_lens[:n], out_lens[n:max_num_reqs] = np.minimum(seq_lens.numpy()[:n] + 1, max_model_len), 0
