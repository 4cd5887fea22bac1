"""The finished rollouts of one training step, as verl's transfer queue holds them, and what rollspec measures of
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rollspec.proposal.base import TokenArray, as_tokens, prompt_key
from rollspec.telemetry.rollouts import rollout_metrics


@dataclass
class Rollouts:
    """Per response: tokens of prompt and response, reward, and the engine's and the trainer's log-probs if kept."""

    prompts: list[TokenArray]
    responses: list[TokenArray]
    scores: list[float]
    engine_logprobs: list[np.ndarray]
    trainer_logprobs: list[np.ndarray]

    @classmethod
    def read(cls, batch: Any) -> Rollouts:
        """Fetch `batch` (verl's `KVBatchMeta`) from the transfer queue; padding samples are left out."""
        import transfer_queue as tq

        fields = ["prompts", "responses", "response_mask", "rm_scores", "rollout_log_probs", "old_log_probs"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        keep = [i for i, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]

        def rows(name: str) -> list[np.ndarray]:
            if name not in data.keys():  # noqa: SIM118 - a TensorDict is not iterated by key
                return []
            unbound = data[name].unbind()
            return [unbound[i].detach().float().cpu().numpy() for i in keep]

        masks = [m > 0 for m in rows("response_mask")]
        masked = {n: _masked(rows(n), masks) for n in ("rollout_log_probs", "old_log_probs")}
        return cls(
            [as_tokens(p) for p in rows("prompts")],
            [as_tokens(r) for r in rows("responses")],
            [float(s.sum()) for s in rows("rm_scores")],
            masked["rollout_log_probs"],
            masked["old_log_probs"],
        )

    @property
    def lengths(self) -> list[int]:
        """Tokens per response."""
        return [len(r) for r in self.responses]

    def rewards(self) -> list[list[Any]]:
        """`[prompt key, response key, reward]` per response, as the engine's operation `rewards` takes them."""
        return [
            [prompt_key(p), prompt_key(r), s] for p, r, s in zip(self.prompts, self.responses, self.scores, strict=True)
        ]

    def metrics(self) -> dict[str, float]:
        """See `rollout_metrics`."""
        return rollout_metrics(self.lengths, self.scores, self.engine_logprobs, self.trainer_logprobs)


def _masked(values: list[np.ndarray], masks: list[np.ndarray]) -> list[np.ndarray]:
    """Values of tokens the policy sampled (tool output in a multi-turn response is not)."""
    return [v[m] if v.shape == m.shape else v for v, m in zip(values, masks, strict=False)]
