"""The rollout side: verl's vLLM server with rollspec's engine configuration and a bounded way to call the workers.

`rollout.name` stays `vllm`, so every branch of verl on that name stays valid; only the class behind it is replaced.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from rollspec_verl import options

logger = logging.getLogger("rollspec")

CALL_SECONDS = 30.0
"""Bound on every call into the engine's workers: rollspec may cost a job at most this once before it is left alone."""


def register() -> None:
    """Put rollspec's replica behind the name `vllm` (verl/workers/rollout/replica.py, `RolloutReplicaRegistry`)."""
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    RolloutReplicaRegistry.register("vllm", load)


def load() -> type:
    """Build the classes; vLLM is imported here, in the processes that need it, and not with the package."""
    import ray
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

    class RollspecServer(vLLMHttpServer):  # type: ignore[misc]
        """One vLLM server of the policy."""

        rollspec_on = False
        rollspec_broken = False

        # vllm_async_server.py:292, before the engine's arguments are built; engine_kwargs win over verl's own.
        def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
            super()._preprocess_engine_kwargs(engine_kwargs)
            config = options.read(self.config)
            if config.enabled:
                given = dict(engine_kwargs.get("additional_config") or {})
                engine_kwargs["additional_config"] = {**given, "rollspec": config.to_dict()}
                self.rollspec_on = True

        async def run_server(self, args: Any) -> None:
            await super().run_server(args)
            if not self.rollspec_on:
                return
            info = await self.rollspec_call("info", {})
            if info.get("state") in (None, "off"):
                # The plugin did not answer: filtered out by VLLM_PLUGINS, or left the engine alone and said why.
                self.rollspec_on = False
                reason = (
                    info.get("reason") or info.get("error") or "its vLLM plugin is not loaded (see rollspec doctor)"
                )
                logger.warning("rollspec: replica %d runs without speculation because %s.", self.replica_rank, reason)
            else:
                # A print, because verl leaves the loggers of its actors at WARNING.
                print(f"rollspec: replica {self.replica_rank} speculates: {info}", flush=True)

        # Called by the weight sync with the trainer's step (vllm_rollout.py, `ServerAdapter.update_weights`).
        async def set_global_steps(self, global_steps: int) -> None:
            await super().set_global_steps(global_steps)
            if self.rollspec_on:
                await self.rollspec_call("set_version", {"version": int(global_steps or 0)})

        async def rollspec_call(self, op: str, payload: dict[str, Any]) -> dict[str, Any]:
            """One operation on the worker that drafts (rollspec/engine/vllm/worker.py). Never raises, never hangs."""
            if not self.rollspec_on or self.rollspec_broken or self.node_rank != 0:
                return {}
            try:
                # verl's own `collective_rpc` drops the results.
                answers = await asyncio.wait_for(
                    self.engine.collective_rpc("rollspec", timeout=CALL_SECONDS, args=(op, payload)), CALL_SECONDS
                )
            except Exception as e:  # a dead or stuck engine is verl's to report; rollspec must not add to it
                self.rollspec_broken = True
                logger.error("rollspec: the engine does not answer %r any more (%s: %s).", op, type(e).__name__, e)
                return {"error": f"{type(e).__name__}: {e}"}
            answer: dict[str, Any] = next((a for a in answers if a), {})
            if "error" in answer:
                logger.warning("%s", answer["error"])
            return answer

    class RollspecReplica(vLLMReplica):  # type: ignore[misc]
        """verl's replica, with the server above for the policy (reward and teacher models are left alone)."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if not (self.is_reward_model or self.is_teacher_model):
                self.server_class = ray.remote(RollspecServer)

    return RollspecReplica
