"""What the hooks keep per `VLLMGeneration`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollspec.engine.calls import why_off
from rollspec.sampling.conversations import Conversation
from rollspec.telemetry.faults import Faults
from rollspec.telemetry.health import HealthWatch
from rollspec.telemetry.wandb_run import WandbWatch
from rollspec_trl import engines

logger = logging.getLogger("rollspec")


class TrlState:
    """One engine of a job, as its trainer process sees it.

    `turns`: what each call of `generate` returned since the trainer began a batch, as (prompts, responses, rollouts):
    those that each prompt went on with, None where that is not known; empty where none is marked.
    """

    def __init__(self) -> None:
        self.engine: engines.TrlEngine | None = None  # None where rollspec is off in it, or another process talks to it
        self.step: Callable[[], int] | None = None  # the trainer's step, where a trainer is hooked
        self.syncs = 0
        self.version: int | None = None
        self.resume: Path | None = None  # checkpoint whose history is still to be loaded
        self.turns: list[tuple[list[Any], list[Any], list[Conversation | None]]] = []
        self.scores: Any = None  # [local batch] reward of each row, NaN where it has none
        self.generation_seconds = 0.0
        self.lengths: list[int] = []
        self.rewards: list[float] = []
        self.logprobs: tuple[list[Any], list[Any]] = ([], [])  # engine's, trainer's, one array per response
        self.overlaps: list[dict[str, float]] = []  # with the last epoch, per batch
        config = engines.config()
        self.health = HealthWatch(config.telemetry.health, config.history.max_bytes)
        self.watch = WandbWatch()
        self.faults = Faults()

    @classmethod
    def of(cls, generation: Any) -> TrlState:
        """The state of a `VLLMGeneration`, made when first asked for."""
        state = generation.__dict__.get("_rollspec")
        if state is None:
            state = generation.__dict__["_rollspec"] = cls()
        return state  # type: ignore[no-any-return]

    def connect(self, generation: Any) -> None:
        """The engine is up: find out whether rollspec is on in it."""
        if not engines.config().enabled:
            return
        engine: engines.TrlEngine
        if generation.mode == "colocate":
            engine = engines.Colocated(generation.llm)
        elif generation.accelerator.is_main_process:
            engine = engines.Server(generation.vllm_client.base_url)
        else:
            return  # the main process talks to the server
        info = engine.call("info")
        if info.get("state") in (None, "off"):
            if generation.mode == "server" or engines.refused(generation) is None:  # else it has been said
                logger.warning("rollspec: this job samples without speculation because %s.", why_off(info))
            return
        self.engine = engine
        if generation.mode == "server" and (reason := engines.refused(generation)):
            logger.error("rollspec: the server speculates, but %s, or start the server without rollspec.", reason)
        logger.info("rollspec: the engine speculates: %s", info)
