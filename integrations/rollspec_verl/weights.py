"""A bound on verl's weight sync, in the process that sends: a dead engine must end the job, not hang it.

`servers.py` checks before each sync whether the engines are alive. This covers an engine that dies or hangs within
a sync: the sender's socket waits without a bound for the next acknowledgement.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from rollspec.engine.vllm.hooks.base import wrap

BUCKET_SECONDS = 300.0
"""Longest wait for an engine to take one bucket of weights (half a GiB by default, so seconds when all is well)."""


def install(module: ModuleType) -> None:
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
