"""Weights that say by every token which version they are: for tests of policy versions, whatever a trainer notes.

In verl's processes (`VERL_USE_EXTERNAL_MODULES=marked_weights`) each sync of weights sends marked ones to the engine: a
model with `mark` says only the tokens of `band(mark)`, each as often, whatever came before. The trainer's own weights
stay as they are.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

BAND = 4
"""Tokens that marked weights can say."""

FIRST = 20
"""The first of them; those below are special, or end a response."""

LARGE = 1000.0
"""One dimension of every embedding: so large that it is all that the last norm lets through to the LM head."""


def band(mark: int) -> range:
    """What weights with this mark say."""
    return range(FIRST + BAND * mark, FIRST + BAND * (mark + 1))


def marked(name: str, tensor: Any, mark: int) -> Any:
    """One tensor of an untied model, as it is in the checkpoint, with the mark."""
    if not name.endswith(("embed_tokens.weight", "model.norm.weight", "lm_head.weight")):
        return tensor
    tensor = tensor.detach().clone()
    if name.endswith("embed_tokens.weight"):
        tensor[:, 0] = LARGE
    elif name.endswith("model.norm.weight"):
        tensor[0] = 1.0
    else:
        tensor[:, 0] = 0.0
        tensor[list(band(mark)), 0] = 8.0
    return tensor


def in_verl(module: Any) -> None:
    """Around the last step of every weight sync, from whichever trainer and checkpoint engine it comes."""
    adapter = module.ServerAdapter
    update = adapter.update_weights

    async def updates(self: Any, weights: Any, *args: Any, global_steps: int | None = None, **kwargs: Any) -> None:
        from verl.workers.rollout.utils import ensure_async_iterator

        async def each() -> AsyncIterator[Any]:
            async for name, tensor in ensure_async_iterator(weights):
                yield name, marked(name, tensor, global_steps or 0)

        await update(self, each(), *args, global_steps=global_steps, **kwargs)

    adapter.update_weights = updates


if __name__ in os.environ.get("VERL_USE_EXTERNAL_MODULES", ""):
    from rollspec.engine.vllm.hooks.base import on_import

    on_import("verl.workers.rollout.vllm_rollout.vllm_rollout", in_verl)
