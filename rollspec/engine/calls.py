"""Bounded calls of rollspec's worker operations from a trainer's processes. None raises or hangs: a training job does
not end because an engine did not answer a question about drafts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from rollspec.telemetry.metrics import NO_ANSWER

logger = logging.getLogger("rollspec")

CALL_SECONDS = 30.0
"""Bound on a call into an engine's workers."""

WAIT_SECONDS = 60.0
"""Bound on waiting for the answers of all engines."""

MOST_FAILURES = 3
"""Calls in a row without an answer after which an engine is left alone: each may hold up the job by its bound."""


class EngineCalls:
    """Mixed into what asks one engine, which may be a trainer's class: hence the names."""

    rollspec_failures = 0
    rollspec_which = ""

    async def rollspec_ask(self, engine: Any, op: str, payload: dict[str, Any]) -> dict[str, Any]:
        """One operation (rollspec/engine/operations.py) of vLLM's `AsyncLLM`, as `rollspec_answer` has it."""
        if self.rollspec_failures >= MOST_FAILURES:
            return {"error": NO_ANSWER}
        try:
            rpc = engine.collective_rpc("rollspec", args=(op, payload))
            return self.rollspec_answer(await asyncio.wait_for(rpc, CALL_SECONDS))
        except Exception as e:
            return self.rollspec_failed(op, e)

    def rollspec_answer(self, answers: Sequence[Any]) -> dict[str, Any]:
        """The answer of the worker that drafts; `{}` where none does, `{"error": sentence}` where something failed."""
        self.rollspec_failures = 0
        answer: dict[str, Any] = next((a for a in answers if a), {})
        if "error" in answer:
            logger.warning("%s", answer["error"])
        return answer

    def rollspec_failed(self, op: str, error: Exception) -> dict[str, Any]:
        """There was none. A dead engine is the trainer's to report; rollspec must not add to it."""
        self.rollspec_failures += 1
        cause = f"{type(error).__name__}: {error}".rstrip(": ")
        again = "" if self.rollspec_failures < MOST_FAILURES else ", which is not asked again,"
        logger.error("rollspec: the engine%s%s does not answer %r (%s).", self.rollspec_which, again, op, cause)
        return {"error": cause}


def why_off(info: dict[str, Any]) -> str:
    """Why an engine that answered `info` so does not speculate."""
    return str(info.get("reason") or info.get("error") or "its vLLM plugin is not loaded (see rollspec doctor)")


def collect(pending: Sequence[Any]) -> list[dict[str, Any]]:
    """The answers that Ray's references stand for; `{"error": ...}` where there was none in time."""
    import ray

    ready = ray.wait(list(pending), num_returns=len(pending), timeout=WAIT_SECONDS)[0] if pending else []
    answers: list[dict[str, Any]] = []
    for ref in pending:
        try:
            answers.append(dict(ray.get(ref)) if ref in ready else {"error": NO_ANSWER})
        except Exception as e:  # the actor is gone; the trainer will meet it too
            answers.append({"error": f"{type(e).__name__}: {e}"})
    return answers
