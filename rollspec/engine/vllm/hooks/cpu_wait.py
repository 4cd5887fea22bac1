"""vLLM-CPU: a process that waits for another takes a core from the one that computes."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

from rollspec.engine.vllm.hooks.base import Patch

SHORTEST = 2e-4  # seconds
LOOK = 25e-6
"""Seconds of the core that one look takes: waking up, looking, and two switches between processes."""
SAME_WAIT = 1e-4  # seconds from one pause to the next at most; what takes longer in between is work

_wait = threading.local()  # of each thread: when its wait began, when its last pause ended


def _pause(sched_yield: Any) -> None:
    """Look for messages in shared memory a few hundred times a second instead of without a pause.

    The engine core polls for the worker's answer with `sched_yield` for as long as a step takes. Beside a GPU that
    costs a core that is not needed; on a CPU it is taken from the model, and under a trainer the server and the
    scheduler poll as well. vLLM's own sleep (`busy_loop_s`, woken over a socket) loses wake-ups when it begins at once.

    A message comes late by half a pause, and the looks until then take `LOOK` each: over a wait of t seconds together
    least with pauses of sqrt(2 · LOOK · t). How long a wait gets is not known; it is taken to be half over.
    """
    now = time.monotonic()
    if now - getattr(_wait, "paused", 0.0) > SAME_WAIT:
        _wait.began = now
    time.sleep(max(SHORTEST, math.sqrt(4.0 * LOOK * (now - _wait.began))))
    _wait.paused = time.monotonic()


CpuIdleWait = Patch(
    "cpu_idle_wait",
    "vllm.distributed.device_communicators.shm_broadcast:sched_yield",
    more=("vllm.distributed.device_communicators.shm_broadcast:SpinCondition.wait",),
    by=("hooks/cpu_wait",),
    arounds=(_pause,),
    why="a process that waits for another takes a core from the one that computes",
    removal="vLLM-CPU does not spin (the engine core takes little processor time while its worker computes)",
)
