"""rollspec's metrics at the `/metrics` of a vLLM server.

The counts are in the worker, `/metrics` is in the API server's process: there a task fetches them every few seconds by
the same operation a trainer uses, as a reader of its own, and puts them into prometheus_client's metrics next to
vLLM's. Nothing is fetched in processes that serve no `/metrics`.

With several API servers the first one does it, and prometheus_client's multi-process mode, which vLLM switches on then,
shows it in all. With data parallelism vLLM answers for its first engine only.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import weakref
from typing import Any

from rollspec.engine.vllm import hooks
from rollspec.engine.vllm.compat import is_on

logger = logging.getLogger("rollspec")

SECONDS = 5.0
"""Between two fetches: below the usual interval of scrapes."""

SERVES_METRICS = "vllm.entrypoints.serve.instrumentator.metrics"
"""The module that mounts `/metrics`."""


TASK = "_rollspec_metrics"
"""On an `AsyncLLM`: its task, None where it needs none."""


def run_output_handler(start: Any, engine: Any) -> None:
    """Around `AsyncLLM._run_output_handler`, which vLLM calls once there is an event loop: starts the task too."""
    start(engine)
    if TASK not in vars(engine):
        hooks.keep(engine, TASK, _task(engine))


def _task(engine: Any) -> asyncio.Task[None] | None:
    first = getattr(engine.engine_core, "client_index", 0) == 0
    if not (first and engine.log_stats and is_on(engine.vllm_config)):
        return None
    # Weakly: the engine must be collectable while the task sleeps.
    return asyncio.create_task(_fetch(weakref.ref(engine)))


async def _fetch(ref: weakref.ref[Any]) -> None:
    from rollspec.telemetry.engine_stats import EngineStats
    from rollspec.telemetry.prometheus import Exporter

    exporter: Exporter | None = None
    try:
        while True:
            await asyncio.sleep(SECONDS)
            engine = ref()
            if engine is None or engine.errored:
                return
            if SERVES_METRICS not in sys.modules:
                continue
            if exporter is None:
                name = engine.vllm_config.model_config.served_model_name
                exporter = Exporter(str(name[0] if isinstance(name, list) else name))
            answers = await engine.collective_rpc("rollspec", args=("stats", {"reader": "prometheus"}))
            answer = next((a for a in answers if a), None)
            del engine
            if answer is not None and "error" not in answer:
                exporter.update(EngineStats.from_dict(answer))
    except Exception as e:  # metrics must not disturb a server, least of all one that ends
        engine = ref()
        if engine is not None and not engine.errored:
            logger.error("rollspec: /metrics has no more news of drafts (%s: %s).", type(e).__name__, e)
