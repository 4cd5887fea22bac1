"""A planted bias: a vLLM logits processor that favours one token. Loaded by name in the engine's own process."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

TOKEN, BIAS = 7, 0.7


class FavourOneToken(LogitsProcessor):
    """Adds `BIAS` to the logit of `TOKEN`, in every request."""

    def apply(self, logits: Any, ctx: Any) -> Any:
        logits[:, TOKEN] += BIAS
        return logits
