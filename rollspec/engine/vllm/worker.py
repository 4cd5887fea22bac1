"""rollspec's side of one vLLM worker: where it is kept, what a head gets beside it, and what the worker must have."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rollspec.config import RollspecConfig
from rollspec.engine.bridge import Bridge
from rollspec.engine.vllm import hooks
from rollspec.engine.vllm.compat import vllm_version
from rollspec.engine.vllm.hooks.table import WorkerSleep, WorkerWakeUp
from rollspec.errors import UnsupportedEngineError
from rollspec.head.ranks import Ranks

if TYPE_CHECKING:
    import torch

    from rollspec.head.draft_head import DraftHead

logger = logging.getLogger("rollspec")

BRIDGE = "_rollspec"
"""On a model runner: rollspec's side of it."""


def equip(worker: Any, bridge: Bridge, head: DraftHead, config: RollspecConfig) -> None:
    """Give a worker's head what swaps and trains it."""
    from rollspec.engine.vllm.draft_weights import DraftWeights
    from rollspec.head.swap import Swapper

    weights = DraftWeights(head)
    head.swapper = Swapper(head, weights, head.ranks, config.proposal.head.canary_drafts)
    bridge.head = head  # last: from now on it sees the steps
    _watch_sleep(worker, head)
    if config.drafter.trains and head.trainable:
        weights.build()  # now rather than at the first swap
        if head.capture is not None:  # on the rank that drafts
            _train(bridge, head, config)


def _train(bridge: Bridge, head: DraftHead, config: RollspecConfig) -> None:
    """Begin to feed the trainer; where none can be fed, the engine serves with the head it has."""
    from drafter_online.errors import DrafterError
    from rollspec.engine import daemon
    from rollspec.head.training import HeadTraining

    assert head.capture is not None
    try:
        folder = config.drafter.dir if config.drafter.mode == "idle" else None
        head.training = HeadTraining(head, folder and daemon.devices(folder) / device_name(head.device))
    except (DrafterError, OSError) as e:
        bridge.count("drafter feedback")
        head.capture.paused = True
        logger.error("rollspec: the drafter gets no feedback: %s", str(e).removeprefix("drafter-online: "))


def device_name(device: torch.device) -> str:
    """What every process of the machine calls a device."""
    from vllm.platforms import current_platform

    return str(current_platform.get_device_uuid(device.index or 0)) if current_platform.is_cuda() else str(device)


def bridge(worker: Any) -> Bridge | None:
    """rollspec's side of a worker, or None where rollspec is not on in it."""
    found: Bridge | None = getattr(getattr(worker, "model_runner", None), BRIDGE, None)
    return found


def ready() -> None:
    """Check that what vLLM needs to sample correctly is in place.

    Raises:
        UnsupportedEngineError: it is not, in one sentence; the engine must not speculate.
    """
    if absent := hooks.missing():
        raise UnsupportedEngineError(
            f"vLLM {vllm_version()} needs the patches {', '.join(absent)} to sample correctly, and "
            f"{hooks.ENV_PATCHES}=none forbids them; unset it"
        )


def is_output_rank(worker: Any) -> bool:
    """vLLM reads drafts from the first tensor-parallel rank of the last pipeline stage only (executor
    `output_rank`).
    """
    parallel = worker.vllm_config.parallel_config
    return int(worker.rank) % int(parallel.tensor_parallel_size) == 0


def ranks_of(vllm_config: Any) -> Ranks:
    """The tensor-parallel group that this worker is in."""
    if int(vllm_config.parallel_config.tensor_parallel_size) <= 1:
        return Ranks()
    from vllm.distributed.parallel_state import get_tp_group

    return Ranks(get_tp_group())


def _watch_sleep(worker: Any, head: DraftHead) -> None:
    """Track when the engine sleeps (its memory is released) and wakes up (the contents of its memory are unknown)."""

    def falls_asleep(sleep: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with head.reading:
            head.sleeps(True)
        return sleep(*args, **kwargs)

    def wakes_up(wake_up: Callable[..., Any], tags: list[str] | None = None) -> Any:
        out = wake_up(tags)
        if tags is None or "weights" in tags:
            head.sleeps(False)
            head.swapper.wake()
            if head.specialists is not None:
                head.specialists.stale = True
        return out

    if hasattr(worker, "sleep") and hasattr(worker, "wake_up"):
        WorkerSleep.wrap(worker, falls_asleep, __name__)
        WorkerWakeUp.wrap(worker, wakes_up, __name__)
