"""vLLM-CPU: a process that waits for another takes a core from the one that computes."""

from __future__ import annotations

import time
from typing import Any

from rollspec.engine.vllm.hooks.base import Patch

PAUSE_SECONDS = 2e-4
"""Between two looks: what a message may come late by, against steps of several milliseconds."""


def _pause(sched_yield: Any) -> None:
    """Look for messages in shared memory a few thousand times a second instead of without a pause.

    The engine core polls for the worker's answer with `sched_yield` for as long as a step takes. Beside a GPU that
    costs a core that is not needed; on a CPU it is taken from the model, and under a trainer the server and the
    scheduler poll as well. vLLM's own sleep (`busy_loop_s`, woken over a socket) loses wake-ups when it begins at once.
    """
    time.sleep(PAUSE_SECONDS)


CpuIdleWait = Patch(
    "cpu_idle_wait",
    "vllm.distributed.device_communicators.shm_broadcast:sched_yield",
    more=("vllm.distributed.device_communicators.shm_broadcast:SpinCondition.wait",),
    by=("hooks/cpu_wait",),
    arounds=(_pause,),
    why="a process that waits for another takes a core from the one that computes",
    removal="vLLM-CPU does not spin (the engine core takes little processor time while its worker computes)",
)
