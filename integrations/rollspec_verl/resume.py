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
    submits with (`LLMServerClient`, llm_server.py:120), each with the turns of a conversation. Idempotent.
    """
    wrap(module.LLMServerClient, "generate", functools.partial(_turn, _submit))
    wrap(module.FullyAsyncLLMServerClient, "generate", functools.partial(_turn, _generate))


async def _turn(
    inner: Callable[..., Any],
    original: Callable[..., Any],
    self: Any,
    request_id: Any,
    *,
    prompt_ids: Any,
    sampling_params: dict[str, Any],
    **kwargs: Any,
) -> Any:
    """Around `inner`: a conversation's requests are marked as its turns."""
    conversation, prompt = None, prompt_ids
    try:
        own = metadata.mapping((sampling_params.get("extra_args") or {}).get(scoring.KEY))
        if _on(self) and scoring.TURN not in own and scoring.ORIGIN not in own and not shows(kwargs):
            from verl.utils import normalize_token_ids

            prompt = normalize_token_ids(prompt_ids)
            conversation = _conversation(self, request_id, prompt)
            sampling_params = marked(sampling_params, {scoring.TURN: conversation.mark()})
    except Exception as e:  # the rollout continues as without rollspec
        log_once.warn(f"the turns of conversations are drafted apart from each other ({type(e).__name__}: {e})")
    out = await inner(original, self, request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **kwargs)
    if conversation is not None:
        conversation.answered(prompt, out.token_ids)
    return out


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


async def _generate(
    original: Callable[..., Any],
    self: Any,
    request_id: Any,
    *,
    prompt_ids: Any,
    sampling_params: dict[str, Any],
    **kwargs: Any,
) -> Any:
    """Every submission of a rollout says which rollout it is of. The caller's mapping is not changed."""
    try:
        if _on(self) and shows(kwargs):
            log_once.warn(
                "rollouts with images, video or sound that are aborted resume with other noise and a history of their "
                "own"
            )
        elif _on(self):
            from verl.utils import normalize_token_ids

            mark = {scoring.ORIGIN: uuid.uuid4().hex, scoring.PROMPT: len(normalize_token_ids(prompt_ids))}
            sampling_params = marked(sampling_params, mark)
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


def _on(client: Any) -> bool:
    on: bool | None = getattr(client, "_rollspec_on", None)
    if on is None:
        rollout = client.config.actor_rollout_ref.rollout
        on = client._rollspec_on = rollout.get("name") == "vllm" and options.read(rollout).enabled
    return on
