"""Prompts scored at the temperature that a request asks for (`rollspec.sampling.scoring`), on the V2 runner.

vLLM computes log-probs of prompt tokens from unscaled logits, chunk by chunk over all rows of the step
(vllm/v1/worker/gpu/sample/prompt_logprob.py). The function that gives it the logits divides each row by its request's
temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from rollspec.sampling.scoring import TEMPERATURE, asked


def score_prompts(
    running: Mapping[str, Any], compute: Callable[..., Any], logits_of: Callable[[torch.Tensor], torch.Tensor],
    hidden_states: torch.Tensor, batch: Any, *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """Around `PromptLogprobsWorker.compute_prompt_logprobs`.

    Args:
        running: the requests that run, each with `sampling_params`. hidden_states: [rows, H].
    """
    each = [float(asked(getattr(running.get(r), "sampling_params", None)).get(TEMPERATURE, 1.0)) for r in batch.req_ids]
    if all(t == 1.0 for t in each):
        return compute(logits_of, hidden_states, batch, *args, **kwargs)
    counts = np.diff(batch.query_start_loc_np[: len(each) + 1])
    rows = torch.from_numpy(np.repeat(np.array(each, np.float32), counts)).to(hidden_states.device)  # [rows]
    at = 0

    def scaled(chunk: torch.Tensor) -> torch.Tensor:
        """Logits of the next rows: vLLM asks for them in order."""
        nonlocal at
        temperatures = rows[at : at + len(chunk)]
        at += len(chunk)
        return logits_of(chunk).float() / temperatures[:, None]

    return compute(scaled, hidden_states, batch, *args, **kwargs)
