"""vLLM-CPU: a process that waits for another takes a core from the one that computes."""

from __future__ import annotations

import time
from types import ModuleType

from rollspec.engine.vllm.hooks.base import Around, CpuPatch, on_import


class CpuIdleWait(CpuPatch):
    """Look for messages in shared memory a few thousand times a second instead of without a pause.

    The engine core polls for the worker's answer with `sched_yield` for as long as a step takes. Beside a GPU that
    costs a core that is not needed; on a CPU it is taken from the model, and under a trainer the server and the
    scheduler poll as well. vLLM's own sleep (`busy_loop_s`, woken over a socket) loses wake-ups when it begins at once.
    """

    name = "cpu_idle_wait"
    targets = (
        "vllm.distributed.device_communicators.shm_broadcast:sched_yield",
        "vllm.distributed.device_communicators.shm_broadcast:SpinCondition.wait",
    )
    why = "a process that waits for another takes a core from the one that computes"
    removal = "vLLM-CPU does not spin (the engine core takes little processor time while its worker computes)"

    @classmethod
    def apply(cls, around: Around | None = None) -> None:
        """Hook the queue's module when it is imported."""
        on_import(cls.targets[0].partition(":")[0], _pause)


PAUSE_SECONDS = 2e-4
"""Between two looks: what a message may come late by, against steps of several milliseconds."""


def _pause(module: ModuleType) -> None:
    module.sched_yield = lambda: time.sleep(PAUSE_SECONDS)  # type: ignore[attr-defined]
