"""The engine of a TRL job: the configuration that `enable` was given, as this process's engine gets it, and bounded
calls of rollspec's worker operations, in the engine that shares this process or over HTTP.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rollspec.config import RollspecConfig
from rollspec.engine import calls
from rollspec.engine.vllm import plugin
from rollspec.telemetry.metrics import NO_ANSWER

logger = logging.getLogger("rollspec")

_config = RollspecConfig(enabled=False)


def set_config(config: RollspecConfig) -> None:
    """Engines of this process are built with `config` from now on; each rank of a job has its own history folder."""
    global _config
    _config = config.of_replica(int(os.environ.get("RANK", "0")))
    plugin.enable(_config)


def config() -> RollspecConfig:
    """What `enable` was given."""
    return _config


@contextmanager
def for_engine(generation: Any) -> Iterator[None]:
    """While TRL builds its engine in this process: leave it as it is if vLLM would refuse its requests otherwise."""
    reason = refused(generation)
    if reason is None or not _config.enabled or generation.mode != "colocate":
        yield
        return
    logger.warning("rollspec: this engine runs without speculation because %s.", reason)
    plugin.enable({"off": reason})
    try:
        yield
    finally:
        plugin.enable(_config)


def refused(generation: Any) -> str | None:
    """Why vLLM would refuse the job's requests if it speculated (vllm/sampling_params.py, `_validate_spec_decode`)."""
    more = generation.generation_kwargs
    if more.get("min_p", generation.min_p):
        return "min_p was set, which vLLM refuses when it speculates; leave it out to speculate"
    if more.get("logit_bias"):
        return "generation_kwargs has logit_bias, which vLLM refuses when it speculates; leave it out to speculate"
    return None


class TrlEngine(calls.EngineCalls):
    """The engine a `VLLMGeneration` samples with."""

    ask: Callable[[str, dict[str, Any]], list[Any]]
    """One answer per worker (rollspec/engine/operations.py). May raise."""

    def call(self, op: str, payload: dict[str, Any] | None = None) -> dict[str, Any]:
        """As `EngineCalls.rollspec_ask`."""
        if self.rollspec_failures >= calls.MOST_FAILURES:
            return {"error": NO_ANSWER}
        try:
            return self.rollspec_answer(self.ask(op, payload or {}))
        except Exception as e:
            return self.rollspec_failed(op, e)


class Colocated(TrlEngine):
    """vLLM's `LLM` in this process."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def ask(self, op: str, payload: dict[str, Any]) -> list[Any]:
        """See `TrlEngine.ask`."""
        return list(self._llm.collective_rpc("rollspec", args=(op, payload)))


class Server(TrlEngine):
    """`vllm serve` with its development endpoints, which TRL needs anyway (VLLM_SERVER_DEV_MODE=1)."""

    def __init__(self, base_url: str) -> None:
        self._url = f"{base_url.rstrip('/')}/collective_rpc"

    def ask(self, op: str, payload: dict[str, Any]) -> list[Any]:
        """See `TrlEngine.ask`."""
        import requests  # TRL's client needs it

        # Not TRL's session: it tries again for a minute, and what it repeats here would count twice.
        reply = requests.post(self._url, json={"method": "rollspec", "args": [op, payload]}, timeout=calls.CALL_SECONDS)
        reply.raise_for_status()
        return list(reply.json()["results"])
