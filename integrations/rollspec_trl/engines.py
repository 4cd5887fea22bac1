"""One bounded call of rollspec's worker operations, in the engine that shares this process or over HTTP.

Neither raises nor hangs: a training job does not end because an engine did not answer a question about drafts.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import Any

logger = logging.getLogger("rollspec")

CALL_SECONDS = 30.0
"""Bound on a call to a server."""

MOST_FAILURES = 3
"""Calls in a row without an answer after which a server is left alone: each may hold up the job by its bound."""


class EngineCalls(ABC):
    """The engine a `VLLMGeneration` samples with."""

    def __init__(self) -> None:
        self.failures = 0

    @abstractmethod
    def ask(self, op: str, payload: dict[str, Any]) -> list[Any]:
        """One answer per worker (rollspec/engine/operations.py). May raise."""

    def call(self, op: str, payload: dict[str, Any] | None = None) -> dict[str, Any]:
        """The answer of the worker that drafts; `{}` where none does, `{"error": sentence}` where something failed."""
        if self.failures >= MOST_FAILURES:
            return {"error": "the engine does not answer"}
        try:
            answers = self.ask(op, payload or {})
        except Exception as e:  # a dead engine is TRL's to report; rollspec must not add to it
            self.failures += 1
            cause = f"{type(e).__name__}: {e}".rstrip(": ")
            again = "" if self.failures < MOST_FAILURES else ", which is not asked again"
            logger.error("rollspec: the engine%s does not answer %r (%s).", again, op, cause)
            return {"error": cause}
        self.failures = 0
        answer: dict[str, Any] = next((a for a in answers if a), {})
        if "error" in answer:
            logger.warning("%s", answer["error"])
        return answer


class Colocated(EngineCalls):
    """vLLM's `LLM` in this process."""

    def __init__(self, llm: Any) -> None:
        super().__init__()
        self._llm = llm

    def ask(self, op: str, payload: dict[str, Any]) -> list[Any]:
        """See `EngineCalls.ask`."""
        return list(self._llm.collective_rpc("rollspec", args=(op, payload)))


class Server(EngineCalls):
    """`vllm serve` with its development endpoints, which TRL needs anyway (VLLM_SERVER_DEV_MODE=1)."""

    def __init__(self, base_url: str) -> None:
        super().__init__()
        self._url = f"{base_url.rstrip('/')}/collective_rpc"

    def ask(self, op: str, payload: dict[str, Any]) -> list[Any]:
        """See `EngineCalls.ask`."""
        import requests  # type: ignore[import-untyped]  # TRL's client needs it

        # Not TRL's session: it tries again for a minute, and what it repeats here would count twice.
        reply = requests.post(self._url, json={"method": "rollspec", "args": [op, payload]}, timeout=CALL_SECONDS)
        reply.raise_for_status()
        return list(reply.json()["results"])
