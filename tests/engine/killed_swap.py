"""A worker that is killed while it swaps, and what the worker that is started after it runs.

Named as `worker_extension_cls`; its methods are called through the server's `/collective_rpc`.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import Any

import torch
from engines import bridge

from drafter_online.versions import Versions


class Worker:
    """Added to the worker's class."""

    def die_in_a_swap(self, daemon: int) -> None:
        """Once half of a version's weights are copied, the daemon, the engine core and this process get SIGKILL."""
        weights = bridge(self).head.swapper.deployment.weights
        core = multiprocessing.parent_process()

        def exchange_half(marks: Any = None) -> None:
            for mine, new in weights._pairs[: len(weights._pairs) // 2]:
                mine.data.copy_(new.data)
            assert core is not None and core.pid is not None
            for pid in (daemon, core.pid, os.getpid()):
                os.kill(pid, signal.SIGKILL)

        weights.exchange = exchange_half

    def running_version(self, store: str) -> dict[str, Any]:
        """Its number, and whether all its weights are those of that version in the store."""
        deployment = bridge(self).head.swapper.deployment
        ran = deployment.running
        stored = Versions(store).load(ran.number).tensors
        same = ran.tensors.keys() == stored.keys() and all(torch.equal(t, stored[n]) for n, t in ran.tensors.items())
        return {"version": ran.number, "whole": same and deployment.weights.intact()}
