"""A planted bias: a vLLM logits processor that favours one token. Loaded by name in the engine's own process."""

from __future__ import annotations

from typing import Any

from vllm.v1.sample.logits_processor import LogitsProcessor

TOKEN, BIAS = 7, 0.7


class FavourOneToken(LogitsProcessor):
    """Adds `BIAS` to the logit of `TOKEN`, in every request."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        pass

    def apply(self, logits: Any) -> Any:
        logits[:, TOKEN] += BIAS
        return logits

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        pass
