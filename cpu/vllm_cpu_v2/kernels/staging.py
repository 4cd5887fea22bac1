"""`buffer_utils`: writes that the host staged for a tensor of the request state, applied at once."""

from __future__ import annotations

import numpy as np
import torch

from ..memory import int32_at


def apply_write(
    output: torch.Tensor,  # [rows, ...]; [groups] addresses with MULTI_GROUP
    output_stride: int | torch.Tensor,  # [groups] with MULTI_GROUP
    write_indices: torch.Tensor,  # [writes] row of each write
    write_starts: torch.Tensor,  # [writes] first column
    write_contents: torch.Tensor,  # [sum of lengths]
    write_cu_lens: torch.Tensor,  # [writes] inclusive sums of lengths
    write_group_ids: torch.Tensor | None,  # [writes], used only with MULTI_GROUP
    MULTI_GROUP: bool,  # noqa: N803
    **_: object,
) -> None:
    """Copy the contents of every write to `output[index, start:]`."""
    contents = write_contents.numpy()
    ends = write_cu_lens.numpy()
    indices = write_indices.numpy().astype(np.int64)
    if MULTI_GROUP:
        addresses, strides, groups = output.tolist(), output_stride.tolist(), write_group_ids.tolist()
        begin = 0
        for group, row, start, end in zip(groups, indices.tolist(), write_starts.tolist(), ends.tolist(), strict=True):
            first, length = row * strides[group] + start, end - begin
            int32_at(addresses[group] + 4 * first, length)[:] = contents[begin:end]
            begin = end
        return
    flat = output.view(-1).numpy()
    firsts = indices * output_stride + write_starts.numpy()
    if ends[-1] == len(ends):  # one value each, the usual case of a decoding batch
        flat[firsts] = contents[: len(ends)]
        return
    begin = 0
    for first, end in zip(firsts.tolist(), ends.tolist(), strict=True):
        flat[first : first + end - begin] = contents[begin:end]
        begin = end
