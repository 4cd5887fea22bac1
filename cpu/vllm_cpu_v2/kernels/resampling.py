"""`spec_decode/rejection_sampler_utils`, second half: the draw of the token behind the accepted drafts.

It comes from the target where all drafts were accepted, else from the residual: what is left of the target beside the
draft that was rejected (Leviathan et al. 2023; per block: Sun et al. 2024, arXiv 2403.10444).
"""

from __future__ import annotations

import numpy as np
import torch

from .rejection import NEG_INF, scaled_drafts
from .sampling import draw


def resample(
    resampled_local_argmax: torch.Tensor,  # [num_reqs, num_blocks], out
    resampled_local_argmax_stride: int,
    resampled_local_max: torch.Tensor,  # [num_reqs, num_blocks], out
    resampled_local_max_stride: int,
    target_logits: torch.Tensor,  # [num_logits, vocab_size]
    target_logits_stride: int,
    target_rejected_logsumexp: torch.Tensor,  # [num_reqs]
    draft_logits: torch.Tensor | None,  # [max_num_reqs, K, vocab_size]
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_rejected_logsumexp: torch.Tensor,  # [num_reqs]
    rejected_step: torch.Tensor,  # [num_reqs]
    cu_num_logits: torch.Tensor,  # [num_reqs + 1]
    expanded_idx_mapping: torch.Tensor,  # [num_logits]
    draft_sampled: torch.Tensor,  # [num_logits]
    temperatures: torch.Tensor,  # [max_num_reqs]
    seeds: torch.Tensor,  # [max_num_reqs]
    pos: torch.Tensor,  # [num_logits]
    cumulative_log_p: torch.Tensor | None,  # [num_logits]
    contexts: torch.Tensor | None,
    contexts_stride: int,
    watermarking: torch.Tensor | None,
    watermarking_skip_mask: torch.Tensor | None,
    watermark_key_0: int,
    watermark_key_1: int,
    vocab_size: int,
    USE_FP64: bool,  # noqa: N803
    USE_BLOCK_VERIFICATION: bool,  # noqa: N803
    WATERMARK: bool,  # noqa: N803
    **_: object,
) -> None:
    """Draw the token behind the accepted drafts: from the target after all of them, else from the residual."""
    if WATERMARK:
        raise NotImplementedError("vllm_cpu_v2 has no watermarked resampling: remove watermark_config.")
    n = len(rejected_step)
    starts = cu_num_logits.numpy()[: n + 1].astype(np.int64)
    steps = rejected_step.numpy().astype(np.int64)
    rows = starts[:-1] + steps
    bonus = rows == starts[1:] - 1
    slots = expanded_idx_mapping.numpy()[rows]
    t = temperatures.numpy()[slots]
    needed = np.flatnonzero(bonus | (t != 0))
    if not needed.size:
        return
    chosen = rows[needed]
    tokens = np.where(bonus, -1, draft_sampled.numpy()[np.minimum(rows + 1, len(draft_sampled) - 1)])[needed]
    target = target_logits[:, :vocab_size]
    noise = t[needed], seeds.numpy()[slots[needed]], pos.numpy()[chosen]
    if draft_logits is None:
        drawn = draw(target, *noise, False, USE_FP64, rows=chosen, without=tokens)
    else:
        residual = target[torch.from_numpy(chosen)].float()
        cut = np.flatnonzero(tokens >= 0)
        at = needed[cut]
        log_p = residual[torch.from_numpy(cut)].numpy() - target_rejected_logsumexp.numpy()[at][:, None]
        if USE_BLOCK_VERIFICATION:
            before = cumulative_log_p.numpy()[np.maximum(rows[at] - 1, 0)]
            log_p += np.where(steps[at] > 0, before, np.float32(0))[:, None]
        log_q = scaled_drafts(draft_logits, slots[at], steps[at], t[at], vocab_size).numpy()
        log_q = log_q - draft_rejected_logsumexp.numpy()[at][:, None]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            ratio = np.exp(log_q - log_p)
            left = np.where(ratio < 1, log_p + np.log1p(-ratio), np.float32(NEG_INF))
        residual[torch.from_numpy(cut)] = torch.from_numpy(left)
        drawn = draw(residual, *noise, False, USE_FP64)
    resampled_local_argmax.numpy()[needed] = drawn[:, None]
    resampled_local_max.zero_()


def insert_resampled(
    sampled: torch.Tensor,  # [num_reqs, K + 1], in and out
    sampled_stride: int,
    num_sampled: torch.Tensor,  # [num_reqs], in and out
    resampled_local_argmax: torch.Tensor,  # [num_reqs, num_blocks]
    resampled_local_argmax_stride: int,
    resampled_local_max: torch.Tensor,
    resampled_local_max_stride: int,
    resample_num_blocks: int,
    cu_num_logits: torch.Tensor,  # [num_reqs + 1]
    expanded_idx_mapping: torch.Tensor,  # [num_logits]
    temperatures: torch.Tensor,  # [max_num_reqs]
    **_: object,
) -> None:
    """Store the drawn token behind the accepted drafts; a greedy request has its rejection's token already."""
    n = len(num_sampled)
    counts, starts = num_sampled.numpy(), cu_num_logits.numpy()[: n + 1]
    rows = starts[:-1] + counts
    t = temperatures.numpy()[expanded_idx_mapping.numpy()[rows]]
    needed = np.flatnonzero((rows == starts[1:] - 1) | (t != 0))
    sampled.numpy()[needed, counts[needed]] = resampled_local_argmax.numpy()[needed, 0]
    counts += 1
