"""Full CUDA graphs for steps in which requests verify drafts of different lengths.

vLLM captures full graphs of decode steps in which every request computes 1 + K tokens. Drafts have lengths of their own
and a request without one computes one token, so hardly a step would find its graph and most would launch every layer
by itself. vLLM also captures graphs for any mix of 1 to 1 + K tokens per request, for its adaptive verification. Here
every engine of ours gets those, where its attention kernels can replay them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from rollspec.engine.vllm.compat import is_on

logger = logging.getLogger("rollspec")

VARIABLE = "_rollspec_variable_graphs"
"""On vLLM's configuration in a worker: whether the runner's graphs are for drafts of different lengths."""


def look_at_attention(create: Callable[..., Any], *args: Any, **given: Any) -> Any:
    """Around `maybe_create_adaptive_verification_manager`, the last call that is given the attention kernels before
    the graphs are planned.
    """
    manager = create(*args, **given)
    vllm_config = given["vllm_config"]
    if manager is None and vllm_config.compilation_config.cudagraph_mode and is_on(vllm_config):
        because = _not_variable_because(given)
        if because is not None and not hasattr(vllm_config, VARIABLE):
            logger.warning(
                "rollspec: %s, so steps with drafts of different lengths run without full CUDA graphs; they can take "
                "longer than steps without speculation where the model is small.",
                because,
            )
        setattr(vllm_config, VARIABLE, because is None)
    return manager


def make_graphs(make: Callable[..., Any], vllm_config: Any, *args: Any, **given: Any) -> Any:
    """Around `ModelCudaGraphManager`."""
    if getattr(vllm_config, VARIABLE, False) and given.get("ubatch_runner") is None:
        given["varlen_decode"] = True
    return make(vllm_config, *args, **given)


def _not_variable_because(given: dict[str, Any]) -> str | None:
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.worker.gpu.attn_utils import get_varlen_cudagraph_unsupported_backend

    longest = given["req_states"].num_speculative_steps + given["num_bonus_tokens"]
    found = get_varlen_cudagraph_unsupported_backend(
        given["attn_groups"], given["vllm_config"], longest, checked_layer_names=given.get("target_layer_names")
    )
    further, name = given.get("additional_attn_cg_support") or (AttentionCGSupport.ALWAYS, None)
    if found is None and further != AttentionCGSupport.ALWAYS:
        found = name, None
    return (
        None if found is None else f"vLLM's attention backend {found[0]} replays graphs for drafts of one length only"
    )
