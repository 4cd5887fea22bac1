"""A bound on verl's weight sync, in the process that sends: a dead engine must end the job, not hang it.

`servers.py` checks before each sync whether the engines are alive. This covers an engine that dies or hangs within
a sync: the sender's socket waits without a bound for the next acknowledgement.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

BUCKET_SECONDS = 300.0
"""Longest wait for an engine to take one bucket of weights (half a GiB by default, so seconds when all is well)."""


def register() -> None:
    """Hook the sender where it is, or will be, imported: in the workers that train."""
    from rollspec.engine.vllm.hooks.base import on_import

    on_import("verl.workers.rollout.vllm_rollout.bucketed_weight_transfer", install)


def install(module: ModuleType) -> None:
    """Wrap `BucketedWeightSender` (bucketed_weight_transfer.py:73 of verl 0.9.1). Idempotent."""
    cls = module.BucketedWeightSender
    init_socket, send = cls._init_socket, cls.async_send_weights
    if getattr(init_socket, "_rollspec", False):
        return
    import zmq

    @functools.wraps(init_socket)
    def bounded_socket(self: Any) -> None:
        init_socket(self)
        milliseconds = int(BUCKET_SECONDS * 1000)
        self.socket.setsockopt(zmq.RCVTIMEO, milliseconds)
        self.socket.setsockopt(zmq.SNDTIMEO, milliseconds)  # a REQ socket without a peer blocks in `send`
        self.socket.setsockopt(zmq.LINGER, 0)  # what no peer fetched must not hold up the process's end

    @functools.wraps(send)
    async def bounded_send(self: Any, weights: Any) -> Any:
        try:
            return await send(self, weights)
        except zmq.Again as e:
            raise TimeoutError(
                f"rollspec: the vLLM engine took no weights for {BUCKET_SECONDS:g} s, so it is dead or stuck; its own "
                "log says why. Resume the job from its last checkpoint."
            ) from e

    bounded_socket._rollspec = True  # type: ignore[attr-defined]
    cls._init_socket, cls.async_send_weights = bounded_socket, bounded_send
