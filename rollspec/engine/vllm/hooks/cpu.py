"""Faults of vLLM's CPU build that are worked around.

Weights: vLLM-CPU packs each linear layer's weight into a private buffer and deletes the parameter
(`layers/linear.py:215`, `remove_weight=True`), so a later `load_weights` fails. Only keeping the parameter is silently
wrong under trainers that do not pack again (TRL, OpenRLHF): the engine keeps the old policy. So `layer.weight` is kept,
and packed again before the next forward pass after any `load_weights`: lazily, because TRL calls that once per
parameter.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
import time
from typing import Any

from rollspec.engine.vllm.hooks.base import MARK, Patch, keep

STALE = f"{MARK}_stale"
"""On a model: its packed weights are older than its parameters."""


def _keep_weight(pack: Any, layer: Any, remove_weight: bool) -> None:
    pack(layer, remove_weight=False)


def _load_and_watch(load_model: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    out = load_model(runner, *args, **kwargs)
    watch(runner.model)
    return out


def _repack_and_execute(execute_model: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    if vars(runner.model).get(STALE, False):
        repack(runner.model)
    return execute_model(runner, *args, **kwargs)


def watch(model: Any) -> None:
    """Mark `model` stale whenever `model.load_weights` ran, however it ended (a failed load may have written some)."""
    load_weights = model.load_weights

    @functools.wraps(load_weights)
    def load_and_mark(*args: Any, **kwargs: Any) -> Any:
        keep(model, STALE, True)
        return load_weights(*args, **kwargs)

    model.__dict__["load_weights"] = load_and_mark
    keep(model, STALE, False)


def repack(model: Any) -> None:
    """Pack every linear layer's current weight again."""
    import vllm.model_executor.layers.utils as utils

    for layer in model.modules():
        if hasattr(layer, "cpu_linear") and getattr(layer, "weight", None) is not None and layer.weight.numel():
            utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    keep(model, STALE, False)


CpuRepackWeights = Patch(
    "cpu_repack_weights",
    "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
    more=(
        "vllm.v1.worker.cpu.model_runner:CPUModelRunner.load_model",
        "vllm.v1.worker.cpu.model_runner:CPUModelRunner.execute_model",
    ),
    correctness=True,
    by=("hooks/cpu",),
    arounds=(_keep_weight, _load_and_watch, _repack_and_execute),
    why="weights that a trainer loads into a running engine do not reach the packed copy that computes",
    removal=(
        "vLLM-CPU repacks on load_weights (test_plugin_engine.py::test_weight_sync_without_the_patch_is_lost fails)"
    ),
)


SHORTEST = 2e-4  # seconds
LOOK = 25e-6
"""Seconds of the core that one look takes: waking up, looking, and two switches between processes."""
SAME_WAIT = 1e-4  # seconds from one pause to the next at most; what takes longer in between is work

_wait = threading.local()  # of each thread: when its wait began, when its last pause ended


def _pause(sched_yield: Any) -> None:
    """Look for messages in shared memory a few hundred times a second instead of without a pause.

    The engine core polls for the worker's answer with `sched_yield` for as long as a step takes. Beside a GPU that
    costs a core that is not needed; on a CPU it is taken from the model, and under a trainer the server and the
    scheduler poll as well. vLLM's own sleep (`busy_loop_s`, woken over a socket) loses wake-ups when it begins at once.

    A message comes late by half a pause, and the looks until then take `LOOK` each: over a wait of t seconds together
    least with pauses of sqrt(2 · LOOK · t). How long a wait gets is not known; it is taken to be half over.
    """
    now = time.monotonic()
    if now - getattr(_wait, "paused", 0.0) > SAME_WAIT:
        _wait.began = now
    time.sleep(max(SHORTEST, math.sqrt(4.0 * LOOK * (now - _wait.began))))
    _wait.paused = time.monotonic()


CpuIdleWait = Patch(
    "cpu_idle_wait",
    "vllm.distributed.device_communicators.shm_broadcast:sched_yield",
    more=("vllm.distributed.device_communicators.shm_broadcast:SpinCondition.wait",),
    by=("hooks/cpu",),
    arounds=(_pause,),
    why="a process that waits for another takes a core from the one that computes",
    removal="vLLM-CPU does not spin (the engine core takes little processor time while its worker computes)",
)


def _without_llvmlite(rebind: Any, overrides: Any) -> None:
    """Leave llvmlite's modules out of the scan.

    `_rebind_kernels` reads `vars(value)` of whatever has a `__dict__`; llvmlite's wrapper of its library answers to any
    name with a function, so the second engine that a process builds dies once numba is loaded, which suffix drafts do
    load.
    """
    hidden = {name: sys.modules.pop(name) for name in [n for n in sys.modules if n.partition(".")[0] == "llvmlite"]}
    try:
        rebind(overrides)
    finally:
        sys.modules.update(hidden)


CpuKernelRegistry = Patch(
    "cpu_kernel_registry",
    "vllm.triton_utils.dispatcher:_rebind_kernels",
    by=("hooks/cpu",),
    arounds=(_without_llvmlite,),
    why="an engine can be built in a process that has loaded numba",
    removal="`_rebind_kernels` asks for the type of what it finds",
)
