"""Hooks on TRL's `VLLMGeneration`, through which all but one of its trainers generate.

TRL's own code runs unchanged; what rollspec adds is caught, logged once, counted and left out.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from rollspec.engine.vllm.hooks.base import wrap_all
from rollspec.head import metadata
from rollspec.sampling.conversations import Conversation
from rollspec.sampling.scoring import TURN
from rollspec_trl import engines
from rollspec_trl.state import TrlState

logger = logging.getLogger("rollspec")


def install(module: ModuleType) -> None:
    """Wrap the methods of `VLLMGeneration` (trl/generation/vllm_generation.py)."""
    hooks = {"_init_vllm": _init, "sync_weights": _sync, "generate": _generate}
    wrap_all(module.VLLMGeneration, "TRL's VLLMGeneration", hooks, "policy versions stay 0")


def _init(original: Callable[..., Any], self: Any) -> Any:
    with engines.for_engine(self):
        out = original(self)
    state = TrlState.of(self)
    with state.faults.left_out("connecting"):
        state.connect(self)
    return out


def _sync(original: Callable[..., Any], self: Any) -> Any:
    """The engine has new weights: a policy version begins. With several ranks each announces it to its own engine."""
    out = original(self)
    state = TrlState.of(self)
    with state.faults.left_out("policy version"):
        version = state.syncs if state.step is None else state.step()
        state.syncs += 1
        if state.engine is not None and version != state.version:  # with sleep mode TRL sends the same weights again
            state.engine.call("set_version", {"version": version})
            state.version = version
        if state.engine is not None and state.resume is not None:
            folder, state.resume = state.resume, None
            answer = state.engine.call("load", {"dir": str(folder)})
            logger.info("rollspec: history of the checkpoint %s: %s", folder, answer)
    return out


def _generate(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    state = TrlState.of(self)
    given = {**dict(zip(("prompts", "images"), args, strict=False)), **kwargs}
    prompts, images = given["prompts"], given.get("images")
    rollouts: list[Conversation | None] = []
    if isinstance(state.engine, engines.Colocated) and state.step is not None and images is None:
        with state.faults.left_out("the turns of rollouts"):
            rollouts = _rollouts(state, prompts)
    began = time.perf_counter()
    llm = getattr(self, "llm", None)
    try:
        if rollouts:
            self.llm = _Marking(llm, rollouts)
        out = original(self, *args, **kwargs)
    finally:
        if rollouts:
            self.llm = llm
    state.generation_seconds += time.perf_counter() - began
    if state.step is not None:
        # TRL's tool loop writes whole rollouts into its lists.
        state.turns.append((list(prompts), list(out[1]), rollouts))
    for rollout, prompt, response in zip(rollouts, prompts, out[1], strict=False):
        if rollout is not None:
            rollout.answered(prompt, response)
    if isinstance(state.engine, engines.Colocated) and engines.config().drafter.mode == "idle":
        # The machine is the trainer's until the engine computes again.
        with state.faults.left_out("drafter training"):
            state.engine.call("updating", {"on": True})
    return out


def _rollouts(state: TrlState, prompts: Sequence[Sequence[int]]) -> list[Conversation | None]:
    """The rollout that each prompt goes on with. TRL's tool loop keeps those of the last turn in their order."""
    if not state.turns:
        return [Conversation.begin(prompt) for prompt in prompts]
    before = iter([r for r in state.turns[-1][2] if r is not None])
    return [next((r for r in before if r.goes_on(prompt)), None) for prompt in prompts]


class _Marking:
    """vLLM's `LLM` for one call of TRL's, whose requests say which turn of which rollout they are."""

    def __init__(self, llm: Any, rollouts: Sequence[Conversation | None]) -> None:
        self._llm, self._rollouts = llm, rollouts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def generate(self, prompts: Any, *args: Any, sampling_params: Any, **kwargs: Any) -> Any:
        """As `LLM.generate`."""
        if len(prompts) == len(self._rollouts) and not isinstance(sampling_params, Sequence):
            common, sampling_params = sampling_params, []
            for rollout in self._rollouts:
                own = copy.copy(common)
                if rollout is not None:
                    own.extra_args = metadata.added(common.extra_args, {TURN: rollout.mark()})
                sampling_params.append(own)
        return self._llm.generate(prompts, *args, sampling_params=sampling_params, **kwargs)
