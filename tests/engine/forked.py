"""Engines of these tests start from processes that have imported vLLM already.

vLLM's CPU platform spawns the engine core, and that spawns its worker: each imports vLLM anew, ten seconds of one core,
for every engine of every test. Here the core is forked by a server that has imported it, and forks its worker, as vLLM
does by itself on GPUs. Programs and servers that tests start are not touched.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing import context, forkserver
from pathlib import Path
from typing import Any

IMPORTED = ["forked_server", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.qwen3"]


class Process(context.ForkServerProcess):
    """Has the environment of the process that starts it, not that of the server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._given = dict(os.environ)

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._given)
        super().run()


class Context(context.ForkServerContext):
    Process = Process  # type: ignore[assignment]


def _context() -> context.BaseContext:
    return Context() if multiprocessing.parent_process() is None else multiprocessing.get_context("fork")


def install() -> None:
    """For engines that this process builds from now on."""
    patch()
    multiprocessing.set_forkserver_preload(IMPORTED)
    before = os.environ.get("PYTHONPATH")
    # Python 3.11 does not hand `sys.path` to the server.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def patch() -> None:
    """Have vLLM start processes by `_context`."""
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    for module in (utils, multiproc_executor):
        module.get_mp_context = _context  # type: ignore[attr-defined]
