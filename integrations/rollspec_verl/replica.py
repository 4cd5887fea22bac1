"""The rollout side: verl's vLLM server with rollspec's engine configuration and a bounded way to call the workers.

`rollout.name` stays `vllm`, so every branch of verl on that name stays valid; only the class behind it is replaced.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from rollspec.engine.calls import EngineCalls, why_off
from rollspec.engine.vllm.hooks.base import wrap
from rollspec.telemetry.metrics import NO_ANSWER
from rollspec_verl import options
from rollspec_verl.reuse import ReusingServer

logger = logging.getLogger("rollspec")

WATCH_SECONDS = 1.0
"""How often a server looks whether its engine lives."""

SHM = Path("/dev/shm")


def install(module: ModuleType) -> None:
    """Put rollspec's replica behind the name `vllm` (verl/workers/rollout/replica.py, `RolloutReplicaRegistry`)."""
    try:
        module.RolloutReplicaRegistry.register("vllm", load)
    except AttributeError as e:
        logger.error("rollspec: verl's replicas are not as expected (%s), so this job runs without rollspec.", e)


def merge_additional_config(given: Any, config: dict[str, Any]) -> dict[str, Any]:
    """The engine's `additional_config` with rollspec's part: `given` is a user's mapping, JSON text or nothing."""
    if isinstance(given, str):
        given = json.loads(given)
    return {**dict(given or {}), "rollspec": config}


def accept_wait_flag(engine: Any) -> None:
    """Let `engine.pause_generation` take what verl 0.9.1 says when it aborts rollouts (vllm_async_server.py:992), and
    what vLLM calls `mode` now. Goes when verl says `mode`.
    """

    async def pause(original: Any, *, wait_for_inflight_requests: bool | None = None, **kwargs: Any) -> Any:
        if wait_for_inflight_requests is not None:
            kwargs["mode"] = "wait" if wait_for_inflight_requests else "abort"
        return await original(**kwargs)

    if "wait_for_inflight_requests" not in inspect.signature(engine.pause_generation).parameters:
        wrap(engine, "pause_generation", pause)


def segments_below() -> set[str]:
    """Names of the shared memory that descendants of this process map; none where there is no /proc.

    vLLM's processes talk through segments that their creator removes when it ends in order. Under verl it never does:
    Ray kills the servers and all below them, and with them Python's resource tracker, so each job leaves some hundred
    MB of names in /dev/shm. A segment's name is needed only until everyone is attached; the memory lives as long as a
    process maps it. So the names an engine had when it was up may be removed as soon as no process will attach any
    more: when it died, and when the training loop has ended.
    """
    import psutil  # vLLM depends on it

    names: set[str] = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(OSError, UnicodeDecodeError):
            names.update(re.findall(r"/dev/shm/(psm_\w+)", Path(f"/proc/{process.pid}/maps").read_text()))
    return names


class ServerCalls(EngineCalls):
    """What the task runner asks a server: operations of rollspec's worker, and whether the engine lives.

    Mixed into verl's server, which has `engine` (vLLM's `AsyncLLM`), `replica_rank` and `node_rank`.
    """

    engine: Any
    replica_rank: int
    node_rank: int
    rollspec_on = False
    rollspec_trains = False  # whether the drafter is trained while engines idle
    rollspec_segments: frozenset[str] = frozenset()

    async def rollspec_call(self, op: str, payload: dict[str, Any]) -> dict[str, Any]:
        """See `EngineCalls.rollspec_ask`; `{}` where rollspec is off."""
        if not self.rollspec_on or self.node_rank != 0:
            return {}
        if self.engine.errored:
            return {"error": NO_ANSWER}
        self.rollspec_which = f" of replica {self.replica_rank}"
        return await self.rollspec_ask(self.engine, op, payload)  # verl's own `collective_rpc` drops the results

    async def rollspec_yield(self) -> None:
        """The devices are verl's until the next weights: the head's training stops at once."""
        if self.rollspec_on and self.rollspec_trains:
            await self.rollspec_call("updating", {"on": True})

    async def rollspec_lost(self) -> str:
        """Why the engine is certainly dead; empty while it is not."""
        engine = getattr(self, "engine", None)
        if engine is None or not engine.errored:
            return ""
        return "its process has ended" if engine.engine_core.resources.engine_dead else "its output has stopped"

    async def rollspec_tidy(self) -> None:
        """Remove the names of the engine's shared memory: it is dead, or has nothing to start any more."""
        names, self.rollspec_segments = self.rollspec_segments, frozenset()
        for name in names:
            with suppress(OSError):
                (SHM / name).unlink()

    async def _rollspec_watch(self) -> None:
        """Say once, in one sentence, that the engine died: verl's log has a traceback per request instead."""
        while not (reason := await self.rollspec_lost()):
            await asyncio.sleep(WATCH_SECONDS)
        rank = self.replica_rank
        print(f"rollspec: the vLLM engine of replica {rank} died ({reason}); its rollouts cannot end.", flush=True)
        await self.rollspec_tidy()


def load() -> type:
    """Build the classes; vLLM is imported here, in the processes that need it, and not with the package."""
    import ray
    from verl.workers.rollout.replica import RolloutMode
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

    class RollspecServer(ReusingServer, ServerCalls, vLLMHttpServer):  # type: ignore[misc]
        """One vLLM server of the policy."""

        rollspec_watcher: asyncio.Task[None] | None = None

        # vllm_async_server.py:292, before the engine's arguments are built; engine_kwargs win over verl's own.
        def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
            super()._preprocess_engine_kwargs(engine_kwargs)
            config = options.read(self.config)
            if config.enabled:
                config = config.of_replica(self.replica_rank)
                # verl writes mappings as JSON on vLLM's command line (vllm_rollout/utils.py:477).
                engine_kwargs["additional_config"] = merge_additional_config(
                    engine_kwargs.get("additional_config"), config.to_dict()
                )
                self.rollspec_on = True
                self.rollspec_trains = config.drafter.mode == "idle"

        async def run_server(self, args: Any) -> None:
            await super().run_server(args)
            accept_wait_flag(self.engine)
            self.rollspec_segments = frozenset(segments_below())
            self.rollspec_watcher = asyncio.create_task(self._rollspec_watch())
            if not self.rollspec_on:
                return
            info, rank = await self.rollspec_call("info", {}), self.replica_rank
            if info.get("state") in (None, "off"):
                # The plugin did not answer: filtered out by VLLM_PLUGINS, or left the engine alone and said why.
                self.rollspec_on = False
                logger.warning("rollspec: replica %d runs without speculation because %s.", rank, why_off(info))
            else:
                # A print, because verl leaves the loggers of its actors at WARNING.
                print(f"rollspec: replica {rank} speculates: {info}", flush=True)
            config = options.read(self.config)
            if config.reuse.mode == "lenient":
                await self.rollspec_begin_reuse(config, info)

        # Called by the weight sync with the trainer's step (vllm_rollout.py:250, `ServerAdapter.update_weights`).
        async def set_global_steps(self, global_steps: int) -> None:
            await super().set_global_steps(global_steps)
            await self.rollspec_new_version(int(global_steps or 0), options.read(self.config).history)
            if self.rollspec_on:
                await self.rollspec_call("set_version", {"version": int(global_steps or 0)})

        # Called when all samples of a step are there (trainer_sync.py, `on_sample_end`): from here to the next weights
        # a colocated trainer has the machine to itself, whether or not the engine gives its memory back.
        async def sleep(self) -> None:
            if self.rollout_mode != RolloutMode.STANDALONE:
                await self.rollspec_yield()
            await super().sleep()

        # Before every weight sync of a standalone server, which never sleeps, and where a colocated trainer takes the
        # machine while rollouts still run.
        async def abort_all_requests(self, *args: Any, **kwargs: Any) -> Any:
            aborted = await super().abort_all_requests(*args, **kwargs)
            await self.rollspec_yield()  # after the last step, which would claim it again
            return aborted

    class RollspecReplica(vLLMReplica):  # type: ignore[misc]
        """verl's replica, with the server above for the policy (reward and teacher models are left alone)."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if not (self.is_reward_model or self.is_teacher_model):
                options.read(self.config)  # an error in the options ends the job here, before an engine starts
                self.server_class = ray.remote(RollspecServer)

    return RollspecReplica
