"""`sample/logprob` and `sample/prompt_logprob`: log-probabilities and ranks of chosen tokens."""

from __future__ import annotations

import numpy as np
import torch


def topk_log_softmax(
    output: torch.Tensor,  # [num_logits, topk], out
    logits: torch.Tensor,  # [num_logits, vocab_size]
    logits_stride: int,
    topk_ids: torch.Tensor,  # [num_logits, topk]
    topk_ids_stride: int,
    topk: int,
    vocab_size: int,
    **_: object,
) -> None:
    """Log-probabilities of the given tokens, in float32."""
    values = logits.float()
    maxima = values.amax(-1, keepdim=True)
    normalizer = (values - maxima).exp_().sum(-1, keepdim=True).log_()
    torch.sub(values.gather(-1, topk_ids) - maxima, normalizer, out=output)


def ranks(
    output: torch.Tensor,  # [num_logits], out
    logits: torch.Tensor,  # [num_logits, vocab_size]
    logits_stride: int,
    token_ids: torch.Tensor,  # [num_logits]
    *_: object,
    **__: object,
) -> None:
    """The number of tokens that are at least as likely as the given one."""
    torch.sum(logits >= logits.gather(-1, token_ids.long()[:, None]), -1, out=output)


def fill_logprob_token_ids(
    out_token_ids: torch.Tensor,  # [num_logits, 1 + columns], out
    out_token_ids_stride: int,
    out_valid_mask: torch.Tensor,  # [num_logits, 1 + columns], out
    out_valid_mask_stride: int,
    sampled_token_ids: torch.Tensor,  # [num_logits]
    topk_indices: torch.Tensor,  # [num_logits, NUM_TOPK]
    topk_indices_stride: int,
    expanded_idx_mapping: torch.Tensor,  # [num_logits]
    num_per_req_token_ids: torch.Tensor,  # [max_num_reqs]
    per_req_token_ids: torch.Tensor,  # [max_num_reqs, max_custom]
    per_req_token_ids_stride: int,
    NUM_TOPK: int,  # noqa: N803
    **_: object,
) -> None:
    """Columns: the sampled token, then the request's own tokens if it has any, else the most likely ones."""
    ids, valid, idx = out_token_ids.numpy(), out_valid_mask.numpy(), expanded_idx_mapping.numpy()
    ids[:, 0], valid[:, 0] = sampled_token_ids.numpy(), True
    custom = num_per_req_token_ids.numpy()[idx]
    if NUM_TOPK:
        ids[:, 1 : 1 + NUM_TOPK], valid[:, 1 : 1 + NUM_TOPK] = topk_indices.numpy()[:, :NUM_TOPK], True
    own = per_req_token_ids.numpy()
    for i in np.flatnonzero(custom).tolist():
        count = int(custom[i])
        ids[i, 1 : 1 + count], valid[i, 1 : 1 + count] = own[idx[i], :count], True
        ids[i, 1 + count :], valid[i, 1 + count :] = 0, False


def prompt_logprobs_token_ids(
    token_ids: torch.Tensor,  # [num_tokens], out
    query_start_loc: torch.Tensor,  # [num_reqs + 1]
    idx_mapping: torch.Tensor,  # [num_reqs]
    num_computed_tokens: torch.Tensor,  # [max_num_reqs]
    all_token_ids: torch.Tensor,  # [max_num_reqs, max_model_len]
    all_token_ids_stride: int,
    **_: object,
) -> None:
    """The token that follows each token of the batch; 0 behind the end of a row, which is not read."""
    out, history, starts = token_ids.numpy(), all_token_ids.numpy(), query_start_loc.numpy()
    for i, slot in enumerate(idx_mapping.tolist()):
        start, end, first = starts[i], starts[i + 1], int(num_computed_tokens[slot]) + 1
        following = history[slot, first : first + end - start]
        out[start : start + len(following)] = following
        out[start + len(following) : end] = 0
