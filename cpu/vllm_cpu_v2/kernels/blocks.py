"""`block_table`: the block tables of a batch and the KV-cache slot of every token in it."""

from __future__ import annotations

import numpy as np
import torch

from ..memory import int32_at

# Rows of a destination table that may hold block ids, by address: V2 wants rows behind the batch to be zero, and the
# padded batch size is part of the grid, which the registry does not pass on.
_rows_written: dict[int, int] = {}


def gather_block_tables(
    idx_mapping: torch.Tensor,  # [num_reqs] row of the batch -> slot of the request state
    sources: torch.Tensor,  # [groups] addresses of int32 [max_num_reqs, stride]
    targets: torch.Tensor,  # [groups] addresses of int32 [max_num_reqs, stride]
    strides: torch.Tensor,  # [groups]
    num_blocks: torch.Tensor,  # [groups, max_num_reqs]
    num_blocks_stride: int,
    num_reqs: int,
    num_computed_tokens: torch.Tensor | None = None,  # [max_num_reqs]; this and what follows from 0.33 on
    sliding_window_reach: torch.Tensor | None = None,  # [groups] tokens that a query still sees; 0: no window
    block_sizes: torch.Tensor | None = None,  # [groups]
    MASK_SLIDING_WINDOW: bool = False,  # noqa: N803
    **_: object,
) -> None:
    """Copy the block ids of each request of the batch into its row; zero the rows behind the batch.

    With a mask, blocks that lie wholly before the window of the step's first query become block 0.
    """
    idx = idx_mapping.numpy()
    counts = num_blocks.numpy()[:, idx]
    rows = num_blocks.shape[1]
    for group, (source, target, stride) in enumerate(
        zip(sources.tolist(), targets.tolist(), strides.tolist(), strict=True)
    ):
        width = int(counts[group].max(initial=0))
        out = int32_at(target, rows * stride).reshape(rows, stride)
        out[:num_reqs, :width] = int32_at(source, rows * stride).reshape(rows, stride)[idx, :width]
        if MASK_SLIDING_WINDOW and (reach := int(sliding_window_reach[group])) > 0:
            hidden = np.maximum(num_computed_tokens.numpy()[idx] - reach, 0) // int(block_sizes[group])
            out[:num_reqs, :width][np.arange(width) < hidden[:, None]] = 0
        written = _rows_written.get(target, rows)
        if written > num_reqs:
            out[num_reqs:written] = 0
        _rows_written[target] = num_reqs


def compute_slot_mappings(
    max_num_tokens: int,
    idx_mapping: torch.Tensor,  # [num_reqs], -1 for a padding request
    query_start_loc: torch.Tensor,  # [num_reqs + 1]
    pos: torch.Tensor,  # [num_tokens]
    block_tables: torch.Tensor,  # [groups] addresses of int32 [max_num_reqs, stride]
    block_table_strides: torch.Tensor,  # [groups]
    block_sizes: torch.Tensor,  # [groups]
    slot_mapping_enabled: torch.Tensor,  # [groups]
    dcp_sharded: torch.Tensor,  # [groups]
    slot_mappings: torch.Tensor,  # [groups, max_num_tokens], out
    slot_mappings_stride: int,
    cp_rank: int,
    CP_SIZE: int,  # noqa: N803
    CP_INTERLEAVE: int,  # noqa: N803
    PAD_ID: int,  # noqa: N803
    **_: object,
) -> None:
    """Write block number * block size + offset for every token; `PAD_ID` for padding and behind the batch."""
    if CP_SIZE != 1:
        raise NotImplementedError(f"vllm_cpu_v2 has no slot mappings for context parallelism (size {CP_SIZE}): use 1.")
    n = len(idx_mapping)
    starts = query_start_loc.numpy()[: n + 1]
    total = int(starts[n])
    idx = idx_mapping.numpy()
    request = idx if total == n and (n < 2 or starts[1] == 1) and _one_each(starts) else np.repeat(idx, np.diff(starts))
    positions = pos.numpy()[:total]
    padding = idx.min(initial=0) < 0
    out = slot_mappings.numpy()
    for group, (table, stride, size, enabled) in enumerate(
        zip(
            block_tables.tolist(),
            block_table_strides.tolist(),
            block_sizes.tolist(),
            slot_mapping_enabled.tolist(),
            strict=True,
        )
    ):
        row = out[group]
        row[total:max_num_tokens] = PAD_ID
        if not enabled or not n:
            row[:total] = PAD_ID
            continue
        flat = int32_at(table, (int(idx.max()) + 1) * stride) if idx.max() >= 0 else None
        if flat is None:
            row[:total] = PAD_ID
            continue
        block, offset = np.divmod(positions, size)
        block += request * stride
        if padding:
            block[request < 0] = 0
        np.multiply(flat[block], size, out=row[:total], dtype=np.int64)
        row[:total] += offset
        if padding:
            row[:total][request < 0] = PAD_ID


def _one_each(starts: np.ndarray) -> bool:
    return bool((starts[1:] - starts[:-1] == 1).all())
