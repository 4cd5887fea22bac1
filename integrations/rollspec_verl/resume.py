"""Rollouts of several requests, all of which say which rollout they belong to and where its prompt ends.

verl aborts rollouts for new weights and submits them again with their tokens so far (llm_server.py,
`FullyAsyncLLMServerClient`), and its agent loops submit a conversation again with every turn. To the engine each is
another request with a longer prompt. With the marks its noise, drafts and history are those of the rollout
(rollspec/sampling/streams.py, `Origin`; rollspec/proposal/base.py, `Turn`), and each token counts as the policy
version's that sampled it.
"""

from __future__ import annotations

import functools
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from rollspec.engine.vllm.hooks.base import wrap
from rollspec.head import metadata
from rollspec.log_once import LogOnce
from rollspec.sampling import scoring
from rollspec.sampling.conversations import Conversation
from rollspec_verl import options

log_once = LogOnce()

MOST_CONVERSATIONS = 1 << 14
"""Conversations remembered per client, the latest ones: most of those that run are far fewer."""


def install(module: ModuleType) -> None:
    """Wrap `FullyAsyncLLMServerClient.generate` (llm_server.py:226), which submits again, and the `generate` that it
    submits with (`LLMServerClient`, llm_server.py:120). Idempotent.
    """
    wrap(module.LLMServerClient, "generate", functools.partial(_generate, False))
    wrap(module.FullyAsyncLLMServerClient, "generate", functools.partial(_generate, True))


async def _generate(
    again: bool,
    original: Callable[..., Any],
    self: Any,
    request_id: Any,
    *,
    prompt_ids: Any,
    sampling_params: dict[str, Any],
    **kwargs: Any,
) -> Any:
    """A request says which turn of which conversation it is and, where it may be submitted again, which rollout. What
    the submissions have sampled is noted in that mark, which verl's loop hands to the next one. The caller's mapping is
    not changed.
    """
    conversation, prompt = None, prompt_ids
    try:
        if _on(self) and shows(kwargs):
            if again:
                log_once.warn(
                    "rollouts with images, video or sound that are aborted resume with other noise and a history of "
                    "their own"
                )
        elif _on(self) and (again or not _is_marked(sampling_params)):
            from verl.utils import normalize_token_ids

            prompt = normalize_token_ids(prompt_ids)
            mark: dict[str, Any] = {scoring.ORIGIN: uuid.uuid4().hex, scoring.PROMPT: len(prompt)} if again else {}
            if not _is_marked(sampling_params):
                conversation = _conversation(self, request_id, prompt)
                mark[scoring.TURN] = conversation.mark()
            sampling_params = marked(sampling_params, mark)
    except Exception as e:  # the rollout continues as without rollspec
        cause = f"({type(e).__name__}: {e})"
        log_once.warn(f"the turns of conversations are drafted apart from each other {cause}")
        if again:
            log_once.warn(f"a rollout that is aborted will resume with other noise {cause}")
    out = await original(self, request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **kwargs)
    if conversation is not None:
        conversation.answered(prompt, out.token_ids)
    own, version = _settings(sampling_params), out.extra_fields.get("global_steps")
    if not again and isinstance(own, dict) and scoring.ORIGIN in own and out.token_ids and version is not None:
        spans = own.get(scoring.SPANS, [])
        own[scoring.SPANS] = [*spans, [len(prompt_ids) - own[scoring.PROMPT], int(version)]]
    return out


def _settings(sampling_params: dict[str, Any]) -> Any:
    return (sampling_params.get("extra_args") or {}).get(scoring.KEY)


def _is_marked(sampling_params: dict[str, Any]) -> bool:
    return bool({scoring.TURN, scoring.ORIGIN} & metadata.mapping(_settings(sampling_params)).keys())


def _conversation(client: Any, request_id: Any, prompt: Sequence[int]) -> Conversation:
    """The one that a request goes on with, or a new one: under full determinism every step has the same ids."""
    known: OrderedDict[Any, Conversation] = client.__dict__.setdefault("_rollspec_conversations", OrderedDict())
    found = known.pop(request_id, None)
    if found is None or not found.goes_on(prompt):
        found = Conversation.begin(prompt)
    known[request_id] = found
    if len(known) > MOST_CONVERSATIONS:
        known.popitem(last=False)
    return found


def shows(kwargs: dict[str, Any]) -> bool:
    """Whether there are images, video or sound: the server and vLLM rewrite such prompts, so where one ends is not
    known here.
    """
    return any(kwargs.get(f"{kind}_data") is not None for kind in ("image", "video", "audio"))


def marked(sampling_params: dict[str, Any], mark: dict[str, Any]) -> dict[str, Any]:
    """`sampling_params`, which are not changed, with more settings of rollspec's own."""
    return {**sampling_params, "extra_args": metadata.added(sampling_params.get("extra_args"), mark)}


def _on(client: Any) -> bool:
    on: bool | None = getattr(client, "_rollspec_on", None)
    if on is None:
        rollout = client.config.actor_rollout_ref.rollout
        on = client._rollspec_on = rollout.get("name") == "vllm" and options.read(rollout).enabled
    return on
