"""Bounded calls of rollspec's worker operations, in the engine that shares this process or over HTTP."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from rollspec.engine import calls
from rollspec.telemetry.rollouts import NO_ANSWER


class TrlEngine(calls.EngineCalls, ABC):
    """The engine a `VLLMGeneration` samples with."""

    @abstractmethod
    def ask(self, op: str, payload: dict[str, Any]) -> list[Any]:
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
