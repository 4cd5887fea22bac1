"""Rollouts that verl aborts for new weights and submits again with their tokens so far (llm_server.py,
`FullyAsyncLLMServerClient`): all their requests say which rollout they belong to and where its prompt ends.

To the engine each is another request with a longer prompt. With the mark its noise, drafts and history are those of the
rollout (rollspec/sampling/streams.py, `Origin`), and each token counts as the policy version's that sampled it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from types import ModuleType
from typing import Any

from rollspec.engine.vllm.hooks.base import on_import, wrap
from rollspec.head import metadata
from rollspec.log_once import LogOnce
from rollspec.sampling import scoring
from rollspec_verl import options

log_once = LogOnce()


def register() -> None:
    """Hook the client where it is, or will be, imported: in the agent loops' workers."""
    on_import("verl.workers.rollout.llm_server", install)


def install(module: ModuleType) -> None:
    """Wrap `FullyAsyncLLMServerClient.generate` (llm_server.py:226), which submits again, and the `generate` that it
    submits with (`LLMServerClient`, llm_server.py:120). Idempotent.
    """
    wrap(module.LLMServerClient, "generate", _submit)
    wrap(module.FullyAsyncLLMServerClient, "generate", _generate)


async def _generate(
    original: Callable[..., Any],
    self: Any,
    request_id: Any,
    *,
    prompt_ids: Any,
    sampling_params: dict[str, Any],
    **kwargs: Any,
) -> Any:
    try:
        if _on(self):
            sampling_params = _named(prompt_ids, sampling_params, kwargs)
    except Exception as e:  # the rollout continues as without rollspec
        log_once.warn(f"a rollout that is aborted will resume with other noise ({type(e).__name__}: {e})")
    return await original(self, request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **kwargs)


async def _submit(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """What a rollout's submissions have sampled is noted in its mark, which the loop hands to the next one."""
    out = await original(self, *args, **kwargs)
    mark = (kwargs["sampling_params"].get("extra_args") or {}).get(scoring.KEY)
    version = out.extra_fields.get("global_steps")
    if isinstance(mark, dict) and scoring.ORIGIN in mark and out.token_ids and version is not None:
        spans = mark.get(scoring.SPANS, [])
        mark[scoring.SPANS] = [*spans, [len(kwargs["prompt_ids"]) - mark[scoring.PROMPT], int(version)]]
    return out


def _named(prompt_ids: Any, sampling_params: dict[str, Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The sampling parameters of every submission of a rollout. The caller's mapping is not changed."""
    if any(kwargs.get(f"{kind}_data") is not None for kind in ("image", "video", "audio")):
        # The server and vLLM rewrite such prompts, so where one ends is not known here.
        log_once.warn(
            "rollouts with images, video or sound that are aborted resume with other noise and a history of their own"
        )
        return sampling_params
    from verl.utils import normalize_token_ids

    extra = dict(sampling_params.get("extra_args") or {})
    own = metadata.mapping(extra.get(scoring.KEY))
    mark = {scoring.ORIGIN: uuid.uuid4().hex, scoring.PROMPT: len(normalize_token_ids(prompt_ids))}
    return {**sampling_params, "extra_args": {**extra, scoring.KEY: {**own, **mark}}}


def _on(client: Any) -> bool:
    on: bool | None = getattr(client, "_rollspec_on", None)
    if on is None:
        rollout = client.config.actor_rollout_ref.rollout
        on = client._rollspec_on = rollout.get("name") == "vllm" and options.read(rollout).enabled
    return on
