"""The policy's servers as the task runner sees them: one bounded call to all of them, and whether one is lost.

verl does not look whether an engine is alive before it sends weights to it, and the sender then waits without a bound
(bucketed_weight_transfer.py, `BucketedWeightSender.async_send_weights`). So the hooks here ask first: a job that would
hang ends with one sentence instead. Asking itself never ends a job: a server that does not answer in time counts as
alive. For an engine that dies or hangs within a sync, the sender's waiting gets a bound.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from rollspec.engine.calls import collect
from rollspec.engine.vllm.hooks.base import wrap

logger = logging.getLogger("rollspec")

ASKS = "_rollspec_asks"

ALIVE_SECONDS = 10.0
"""Bound on waiting for signs of life, and on tidying up."""

BUCKET_SECONDS = 300.0
"""Longest wait for an engine to take one bucket of weights (half a GiB by default, so seconds when all is well)."""


class EngineLost(RuntimeError):  # noqa: N818 - reads as what happened
    """A rollout replica has no engine any more, and verl cannot continue without it."""


def install(module: ModuleType) -> None:
    """Ask before every weight sync, in whichever trainer: wrap `CheckpointEngineManager.update_weights`
    (verl/checkpoint_engine/base.py:510). Idempotent.

    verl's `auto_await` looks at the caller's frame to see whether it will await, so what is wrapped is the coroutine
    function below it.
    """
    cls = module.CheckpointEngineManager
    coroutine = inspect.unwrap(cls.update_weights)
    if ASKS not in vars(cls):
        cls.update_weights = module.auto_await(
            functools.wraps(coroutine)(functools.partial(_update_weights, coroutine))
        )
        setattr(cls, ASKS, True)


async def _update_weights(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    await asyncio.to_thread(require_alive, self.replicas)
    return await original(self, *args, **kwargs)


def replicas_of(trainer: Any) -> list[Any]:
    """The replicas that sample the policy (trainer_base.py:1381), of the fully asynchronous recipe also those on the
    trainer's devices, which mostly sleep.
    """
    of = getattr(trainer, "_rollout_server_managers", None)
    managers = [trainer.llm_server_manager] if of is None else of()
    found = (r for m in managers for r in (*m.get_replicas(), *getattr(m, "hybrid_replicas", {}).values()))
    return list({id(r): r for r in found}.values())


def call(
    trainer: Any, op: str, payload: Callable[[int], dict[str, Any]] = lambda i: {}, wait: bool = True
) -> list[dict[str, Any]]:
    """Run one operation on every replica; `payload` takes the replica's number.

    Returns one answer per replica, `{"error": ...}` where there was none, `{}` where rollspec is off; nothing at all
    without `wait`.
    """
    handles = [r.server_handle for r in replicas_of(trainer) if r.server_handle is not None]
    pending = [handle.rollspec_call.remote(op, payload(i)) for i, handle in enumerate(handles)]
    return collect(pending) if wait else []


def lost(replicas: Sequence[Any]) -> str | None:
    """One sentence if the engine of one of `replicas` is certainly dead, else None. Never raises."""
    import ray

    try:
        handles = {i: r.server_handle for i, r in enumerate(replicas) if hasattr(r.server_handle, "rollspec_lost")}
        asked = {handle.rollspec_lost.remote(): i for i, handle in handles.items()}
        ready = ray.wait([*asked], num_returns=len(asked), timeout=ALIVE_SECONDS)[0] if asked else []
        for ref in ready:
            try:
                reason = ray.get(ref)
            except ray.exceptions.RayActorError:
                reason = "its server's process is gone"
            if reason:
                return (
                    f"rollspec: the vLLM engine of rollout replica {asked[ref]} is dead ({reason}), and the job cannot "
                    "continue without it; its own log says why it died. Resume the job from its last checkpoint."
                )
    except Exception as e:
        logger.error("rollspec: cannot find out whether the engines live (%s: %s).", type(e).__name__, e)
    return None


def require_alive(replicas: Sequence[Any]) -> None:
    """Raises EngineLost if the engine of one of `replicas` is certainly dead."""
    sentence = lost(replicas)
    if sentence is not None:
        raise EngineLost(sentence)


def tidy(trainer: Any) -> None:
    """The training loop has ended: remove the names of the engines' shared memory (`replica.segments_below`)."""
    import ray

    asks = [getattr(r.server_handle, "rollspec_tidy", None) for r in replicas_of(trainer)]
    pending = [ask.remote() for ask in asks if ask is not None]
    if pending:
        ray.wait(pending, num_returns=len(pending), timeout=ALIVE_SECONDS)


# ---- in the workers that train


def install_sender(module: ModuleType) -> None:
    """Wrap `BucketedWeightSender` (bucketed_weight_transfer.py:73 of verl 0.9.1). Idempotent."""
    wrap(module.BucketedWeightSender, "_init_socket", _init_socket)
    wrap(module.BucketedWeightSender, "async_send_weights", _send)


def _init_socket(original: Callable[..., Any], self: Any) -> None:
    import zmq

    original(self)
    milliseconds = int(BUCKET_SECONDS * 1000)
    self.socket.setsockopt(zmq.RCVTIMEO, milliseconds)
    self.socket.setsockopt(zmq.SNDTIMEO, milliseconds)  # a REQ socket without a peer blocks in `send`
    self.socket.setsockopt(zmq.LINGER, 0)  # what no peer fetched must not hold up the process's end


async def _send(original: Callable[..., Any], self: Any, weights: Any) -> Any:
    import zmq

    try:
        return await original(self, weights)
    except (zmq.Again, FileNotFoundError) as e:
        # An engine that dies takes the shared memory with it, which verl then misses when it cleans up.
        if not isinstance(e, zmq.Again) and not isinstance(e.__context__, zmq.Again):
            raise
        raise TimeoutError(
            f"rollspec: the vLLM engine took no weights for {BUCKET_SECONDS:g} s, so it is dead or stuck; its own "
            "log says why. Resume the job from its last checkpoint."
        ) from e
