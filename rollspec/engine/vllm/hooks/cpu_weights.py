"""vLLM-CPU: packed weights go stale, or vanish, when a trainer loads new weights into a running engine.

vLLM-CPU packs each linear layer's weight into a private buffer and deletes the parameter (`layers/linear.py:215`,
`remove_weight=True`), so a later `load_weights` fails. Only keeping the parameter is silently wrong under trainers that
do not pack again (TRL, OpenRLHF): the engine keeps the old policy. So `layer.weight` is kept, and packed again before
the next forward pass after any `load_weights`: lazily, because TRL calls that once per parameter.
"""

from __future__ import annotations

import functools
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
    by=("hooks/cpu_weights",),
    arounds=(_keep_weight, _load_and_watch, _repack_and_execute),
    why="weights that a trainer loads into a running engine do not reach the packed copy that computes",
    removal=(
        "vLLM-CPU repacks on load_weights (test_plugin_engine.py::test_weight_sync_without_the_patch_is_lost fails)"
    ),
)
