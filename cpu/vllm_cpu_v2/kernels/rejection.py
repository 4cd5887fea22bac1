"""`spec_decode/rejection_sampler(_utils)`: verification of drafts, per token (Leviathan et al. 2023) or per block
(Sun et al. 2024, arXiv 2403.10444). The draw from the residual is in `resampling`.

The kernels hand statistics of vocabulary blocks to each other. Here the statistics of a whole row stand in its first
block; the functions of this module are the only readers.
"""

from __future__ import annotations

import numpy as np
import torch

from ..memory import arange
from ..noise import uniform

NEG_INF = float("-inf")


def flatten_sampled(
    flat_sampled: torch.Tensor,  # [num_logits], out
    sampled: torch.Tensor,  # [num_reqs, K + 1]
    sampled_stride: int,
    num_sampled: torch.Tensor,  # [num_reqs]
    cu_num_logits: torch.Tensor,  # [num_reqs + 1]
    **_: object,
) -> None:
    """Put the sampled tokens of each request at its rows."""
    taken = arange(sampled.shape[1]) < num_sampled.numpy()[:, None]
    at = cu_num_logits.numpy()[: len(taken), None] + arange(sampled.shape[1])
    flat_sampled.numpy()[at[taken]] = sampled.numpy()[taken]


def gather_draft_sampled(
    draft_sampled: torch.Tensor,  # [num_logits], out
    pos: torch.Tensor,  # [num_logits], out
    input_ids: torch.Tensor,  # [num_tokens]
    positions: torch.Tensor,  # [num_tokens]
    logits_indices: torch.Tensor,  # [num_logits]
    expanded_idx_mapping: torch.Tensor,  # [num_logits]
    expanded_local_pos: torch.Tensor,  # [num_logits]
    prefill_len: torch.Tensor,  # [max_num_reqs]
    num_logits: int,
    **_: object,
) -> None:
    """The token and position fed at each row; -1 for draft rows of a request whose step began within its prompt."""
    at, local = logits_indices.numpy(), expanded_local_pos.numpy()
    where = positions.numpy()[at]
    tokens = input_ids.numpy()[at]
    tokens[(local > 0) & (where - local < prefill_len.numpy()[expanded_idx_mapping.numpy()])] = -1
    draft_sampled.numpy()[:num_logits], pos.numpy()[:num_logits] = tokens, where


def draft_rows(expanded_local_pos: torch.Tensor) -> np.ndarray:
    """Rows whose next row is a draft of the same request: those that verify something."""
    return np.flatnonzero(expanded_local_pos.numpy()[1:] > 0)


def set_first_block(out: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, rest: float) -> None:
    """Write a statistic of whole rows, so that a reduction over blocks gives it back."""
    out[rows, 0] = values
    if out.shape[1] > 1:
        out[rows, 1:] = rest


def max_and_sumexp(logits: torch.Tensor, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row: the maximum and the sum of exponentials of the distance to it, 0 if everything is masked.

    A row at a time, whose values stay in a core's cache.
    """
    maxima, sums = torch.empty(len(rows)), torch.empty(len(rows))
    for i, row in enumerate(rows.tolist()):
        values = logits[row].float()
        torch.amax(values, 0, out=maxima[i])
        torch.sum((values - maxima[i]).exp_(), 0, out=sums[i])
    return maxima, torch.where(maxima > NEG_INF, sums, 0.0)


def scaled_drafts(
    draft_logits: torch.Tensor, slots: np.ndarray, steps: np.ndarray, temperatures: np.ndarray, vocab_size: int
) -> torch.Tensor:
    """Draft logits of rows, divided by their temperatures: float32 [rows, vocab_size]."""
    values = draft_logits[torch.from_numpy(slots), torch.from_numpy(steps.astype(np.int64)), :vocab_size].float()
    return values / torch.from_numpy(temperatures)[:, None]


def compute_logits_stats(
    target_local_argmax: torch.Tensor,  # [num_logits, num_blocks], out
    target_local_argmax_stride: int,
    target_local_max: torch.Tensor,  # [num_logits, num_blocks], out
    target_local_max_stride: int,
    target_local_sumexp: torch.Tensor,  # [num_logits, num_blocks], out
    target_local_sumexp_stride: int,
    draft_local_max: torch.Tensor,  # [num_logits, num_blocks], out
    draft_local_max_stride: int,
    draft_local_sumexp: torch.Tensor,  # [num_logits, num_blocks], out
    draft_local_sumexp_stride: int,
    target_logits: torch.Tensor,  # [num_logits, vocab_size]
    target_logits_stride: int,
    draft_logits: torch.Tensor | None,  # [max_num_reqs, K, vocab_size], before temperature
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    expanded_idx_mapping: torch.Tensor,  # [num_logits]
    expanded_local_pos: torch.Tensor,  # [num_logits]
    temperatures: torch.Tensor,  # [max_num_reqs]
    vocab_size: int,
    num_speculative_steps: int,
    **_: object,
) -> None:
    """Maximum and sum of exponentials of target and draft for random rows, argmax for greedy rows."""
    rows = draft_rows(expanded_local_pos)
    if not rows.size:
        return
    slots = expanded_idx_mapping.numpy()[rows]
    t = temperatures.numpy()[slots]
    greedy, random = rows[t == 0], rows[t != 0]
    if greedy.size:
        at = torch.from_numpy(greedy)
        set_first_block(target_local_argmax, at, target_logits[at, :vocab_size].argmax(-1), 0)
    if not random.size:
        return
    at = torch.from_numpy(random)
    maxima, sums = max_and_sumexp(target_logits[:, :vocab_size], random)
    set_first_block(target_local_max, at, maxima, NEG_INF)
    set_first_block(target_local_sumexp, at, sums, 0.0)
    if draft_logits is not None:
        steps = expanded_local_pos.numpy()[random]
        drafts = scaled_drafts(draft_logits, slots[t != 0], steps, t[t != 0], vocab_size)
        maxima, sums = max_and_sumexp(drafts, arange(len(drafts)))
        set_first_block(draft_local_max, at, maxima, NEG_INF)
        set_first_block(draft_local_sumexp, at, sums, 0.0)


def logsumexp(local_max: torch.Tensor, local_sumexp: torch.Tensor, rows: np.ndarray) -> np.ndarray:
    """The logarithm of the sum of exponentials of whole rows: float32 [rows]."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return local_max.numpy()[rows, 0] + np.log(local_sumexp.numpy()[rows, 0])


def log_ratio(
    rows: np.ndarray,  # [m] rows of target_logits
    tokens: np.ndarray,  # [m]
    slots: np.ndarray,  # [m]
    steps: np.ndarray,  # [m]
    temperatures: np.ndarray,  # [m], not 0
    target_logits: torch.Tensor,
    target_stats: tuple[torch.Tensor, torch.Tensor],
    draft_logits: torch.Tensor | None,
    draft_stats: tuple[torch.Tensor, torch.Tensor],
) -> tuple[np.ndarray, np.ndarray]:
    """log p and log q of tokens, float32 [m] each; log q of a one-hot draft is 0."""
    ids = torch.from_numpy(tokens.astype(np.int64))
    log_p = target_logits[torch.from_numpy(rows), ids].float().numpy() - logsumexp(*target_stats, rows)
    if draft_logits is None:
        return log_p, np.zeros_like(log_p)
    chosen = draft_logits[torch.from_numpy(slots), torch.from_numpy(steps.astype(np.int64)), ids].float().numpy()
    return log_p, chosen / temperatures - logsumexp(*draft_stats, rows)


def compute_cumulative_log_p(
    cumulative_log_p: torch.Tensor,  # [num_logits], out
    target_logits: torch.Tensor,  # [num_logits, vocab_size]
    target_logits_stride: int,
    target_local_max: torch.Tensor,
    target_local_max_stride: int,
    target_local_sumexp: torch.Tensor,
    target_local_sumexp_stride: int,
    draft_sampled: torch.Tensor,  # [num_logits]
    draft_logits: torch.Tensor | None,  # [max_num_reqs, K, vocab_size]
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_local_max: torch.Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp: torch.Tensor,
    draft_local_sumexp_stride: int,
    cu_num_logits: torch.Tensor,  # [num_reqs + 1]
    idx_mapping: torch.Tensor,  # [num_reqs]
    temperatures: torch.Tensor,  # [max_num_reqs]
    *_: object,
    **__: object,
) -> None:
    """The running joint ratio of a block, log p_i = min(log p_{i-1} + log p - log q, 0); -1 drafts carry it on."""
    slots = idx_mapping.numpy()
    t = temperatures.numpy()[slots]
    starts = cu_num_logits.numpy()[: len(slots) + 1]
    num_drafts = starts[1:] - starts[:-1] - 1
    out, tokens = cumulative_log_p.numpy(), draft_sampled.numpy()
    running = np.zeros(len(slots), dtype=np.float32)
    for step in range(int(num_drafts.max(initial=0))):
        alive = np.flatnonzero((num_drafts > step) & (t != 0))
        rows = starts[alive] + step
        real = tokens[rows + 1] >= 0
        r, a = rows[real], alive[real]
        log_p, log_q = log_ratio(
            r,
            tokens[r + 1],
            slots[a],
            np.full(len(r), step),
            t[a],
            target_logits,
            (target_local_max, target_local_sumexp),
            draft_logits,
            (draft_local_max, draft_local_sumexp),
        )
        running[a] = np.minimum(running[a] + (log_p - log_q), np.float32(0))
        out[rows] = running[alive]


def compute_residual_mass(
    local_residual_mass: torch.Tensor,  # [num_logits, num_blocks], out
    local_residual_mass_stride: int,
    cumulative_log_p: torch.Tensor,  # [num_logits]
    target_logits: torch.Tensor,  # [num_logits, vocab_size]
    target_logits_stride: int,
    target_local_max: torch.Tensor,
    target_local_max_stride: int,
    target_local_sumexp: torch.Tensor,
    target_local_sumexp_stride: int,
    draft_logits: torch.Tensor,  # [max_num_reqs, K, vocab_size]
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_local_max: torch.Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp: torch.Tensor,
    draft_local_sumexp_stride: int,
    draft_sampled: torch.Tensor,  # [num_logits]
    expanded_idx_mapping: torch.Tensor,  # [num_logits]
    expanded_local_pos: torch.Tensor,  # [num_logits]
    temperatures: torch.Tensor,  # [max_num_reqs]
    vocab_size: int,
    *_: object,
    **__: object,
) -> None:
    """sum over x of max(p_i M_b(x) - M_s(x), 0), for the draft rows behind the first of a request."""
    rows = draft_rows(expanded_local_pos)
    slots = expanded_idx_mapping.numpy()[rows]
    t = temperatures.numpy()[slots]
    steps = expanded_local_pos.numpy()[rows]
    wanted = (steps > 0) & (t != 0) & (draft_sampled.numpy()[rows + 1] >= 0)
    rows, slots, steps, t = rows[wanted], slots[wanted], steps[wanted], t[wanted]
    if not rows.size:
        return
    at = torch.from_numpy(rows)
    target_lse = torch.from_numpy(logsumexp(target_local_max, target_local_sumexp, rows))[:, None]
    draft_lse = torch.from_numpy(logsumexp(draft_local_max, draft_local_sumexp, rows))[:, None]
    big = (target_logits[at, :vocab_size].float() - target_lse).exp_()
    small = (scaled_drafts(draft_logits, slots, steps, t, vocab_size) - draft_lse).exp_()
    joint = cumulative_log_p[at - 1].exp()[:, None]
    set_first_block(local_residual_mass, at, (joint * big - small).clamp_(min=0).sum(-1), 0.0)


def reject(
    sampled: torch.Tensor,  # [num_reqs, K + 1], out
    sampled_stride: int,
    rejected_steps: torch.Tensor,  # [num_reqs], out: number of accepted drafts
    target_rejected_logsumexp: torch.Tensor,  # [num_reqs], out
    draft_rejected_logsumexp: torch.Tensor,  # [num_reqs], out
    target_logits: torch.Tensor,  # [num_logits, vocab_size]
    target_logits_stride: int,
    target_local_argmax: torch.Tensor,
    target_local_argmax_stride: int,
    target_local_max: torch.Tensor,
    target_local_max_stride: int,
    target_local_sumexp: torch.Tensor,
    target_local_sumexp_stride: int,
    draft_sampled: torch.Tensor,  # [num_logits], -1: reject
    draft_logits: torch.Tensor | None,  # [max_num_reqs, K, vocab_size]
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_local_max: torch.Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp: torch.Tensor,
    draft_local_sumexp_stride: int,
    cu_num_logits: torch.Tensor,  # [num_reqs + 1]
    idx_mapping: torch.Tensor,  # [num_reqs]
    temperatures: torch.Tensor,  # [max_num_reqs]
    seeds: torch.Tensor,  # [max_num_reqs]
    pos: torch.Tensor,  # [num_logits]
    synthetic_conditional_rates: torch.Tensor | None,  # [K]
    cumulative_log_p: torch.Tensor | None,  # [num_logits]
    local_residual_mass: torch.Tensor | None,  # [num_logits, num_blocks]
    *_: object,
    USE_BLOCK_VERIFICATION: bool,  # noqa: N803
    FLY_WINDOW_SIZE: int | None = None,  # noqa: N803  # from 0.33 on
    **__: object,
) -> None:
    """Accept a prefix of each request's drafts and store it, with the target's argmax behind it for greedy requests."""
    if FLY_WINDOW_SIZE:
        raise NotImplementedError("vllm_cpu_v2 has no rejection_sample_method 'fly': use another one.")
    n = len(idx_mapping)
    starts = cu_num_logits.numpy()[: n + 1].astype(np.int64)
    num_drafts = starts[1:] - starts[:-1] - 1
    accepted_out = rejected_steps.numpy()
    target_rejected_logsumexp.zero_()
    draft_rejected_logsumexp.zero_()
    if not num_drafts.any():
        accepted_out[:n] = 0
        return
    slots_of = idx_mapping.numpy()
    steps_of = arange(int(num_drafts.max()))
    taken = steps_of < num_drafts[:, None]  # [num_reqs, K]
    request, step = np.nonzero(taken)
    rows = starts[request] + step
    slots = slots_of[request]
    t = temperatures.numpy()[slots]
    greedy = t == 0
    tokens = draft_sampled.numpy()[rows + 1]
    real = tokens >= 0
    tokens = np.maximum(tokens, 0).astype(np.int64)
    target_stats, draft_stats = (target_local_max, target_local_sumexp), (draft_local_max, draft_local_sumexp)
    argmax = target_local_argmax.numpy()[:, 0]
    agree = argmax[rows] == tokens
    random = np.flatnonzero(~greedy)
    if random.size or synthetic_conditional_rates is not None:
        seed = seeds.numpy()[slots]
        if USE_BLOCK_VERIFICATION and FLY_WINDOW_SIZE is not None:  # 0.33 mixes the step into it
            seed = seed ^ (step.astype(np.int64) << 32)
        u = uniform(seed, pos.numpy()[rows])
    if synthetic_conditional_rates is not None:
        agree = u < synthetic_conditional_rates.numpy()[step]
    elif random.size and not USE_BLOCK_VERIFICATION:
        r = rows[random]
        log_p, log_q = log_ratio(
            r, tokens[random], slots[random], step[random], t[random],
            target_logits, target_stats, draft_logits, draft_stats,
        )  # fmt: skip
        agree[random] = log_p > np.log(u[random]) + log_q
    matrix = np.zeros(taken.shape, dtype=bool)
    matrix[taken] = agree & real
    accepted = np.logical_and.accumulate(matrix, axis=1).sum(1)
    if USE_BLOCK_VERIFICATION and random.size:
        h = _block_threshold(
            rows, step, num_drafts[request], draft_sampled.numpy(), target_logits, target_stats,
            cumulative_log_p.numpy(), local_residual_mass,
        )  # fmt: skip
        alive, passed = np.zeros(taken.shape, dtype=bool), np.zeros(taken.shape, dtype=bool)
        alive[taken], passed[taken] = real, u <= h
        passed &= np.logical_and.accumulate(alive, axis=1)
        longest = ((steps_of + 1) * passed).max(1)
        accepted = np.where(temperatures.numpy()[slots_of] == 0, accepted, longest)

    accepted_out[:n] = accepted
    out = sampled.numpy()
    out[request, step] = tokens
    short = np.flatnonzero(accepted < num_drafts)
    last = starts[short] + accepted[short]
    is_greedy = temperatures.numpy()[slots_of[short]] == 0
    out[short[is_greedy], accepted[short][is_greedy]] = argmax[last[is_greedy]]
    short, last = short[~is_greedy], last[~is_greedy]
    target_rejected_logsumexp.numpy()[short] = logsumexp(*target_stats, last)
    if draft_logits is not None:
        draft_rejected_logsumexp.numpy()[short] = logsumexp(*draft_stats, last)


def _block_threshold(
    rows: np.ndarray,  # [m] draft rows of all requests
    step: np.ndarray,  # [m]
    num_drafts: np.ndarray,  # [m] of the row's request
    tokens: np.ndarray,  # [num_logits]
    target_logits: torch.Tensor,
    target_stats: tuple[torch.Tensor, torch.Tensor],
    cumulative_log_p: np.ndarray,
    local_residual_mass: torch.Tensor | None,
) -> np.ndarray:
    """The acceptance threshold h of every prefix: float32 [m]."""
    joint = np.exp(cumulative_log_p[rows])
    following = np.full(len(rows), -1)
    inner = step < num_drafts - 1
    following[inner] = tokens[rows[inner] + 2]
    more = np.flatnonzero(following >= 0)
    h = joint.copy()
    behind = rows[more] + 1
    if local_residual_mass is not None:
        mass = local_residual_mass.numpy()[behind].sum(-1)
    else:
        ids = torch.from_numpy(following[more].astype(np.int64))
        log_p = target_logits[torch.from_numpy(behind), ids].float().numpy() - logsumexp(*target_stats, behind)
        with np.errstate(over="ignore", invalid="ignore"):  # greedy rows have no statistics, and none are read
            mass = joint[more] * (np.float32(1) - np.exp(log_p))
    denominator = mass + np.float32(1) - joint[more]
    h[more] = np.where(denominator > 0, mass / np.where(denominator > 0, denominator, 1), np.float32(1))
    return h
