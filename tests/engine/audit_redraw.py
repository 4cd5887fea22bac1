"""A planted fault of speculation: after a rejection the token is redrawn from the target itself.

Exact rejection sampling redraws from what is left of the target once the draft is taken out; SPEC-RL does not. Named as
`worker_extension_cls`, this module is imported in the worker's process, and the import plants the fault.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample import rejection_sampler


class RedrawFromTarget:
    """Adds nothing to the worker; a worker extension has to be a class."""


def _redraw(
    max_spec_len: int,
    num_draft_tokens: list[int],
    cu_num_draft_tokens: Any,
    draft_token_ids: Any,
    draft_probs: Any,
    target_probs: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    return torch.multinomial(target_probs, 1)[:, 0].to(draft_token_ids.dtype)  # [num_tokens]


rejection_sampler.sample_recovered_tokens = _redraw
