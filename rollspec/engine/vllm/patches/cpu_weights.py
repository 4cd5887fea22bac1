"""vLLM-CPU: packed weights go stale, or vanish, when a trainer loads new weights into a running engine."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from rollspec.engine.vllm.patches.base import Patch, on_import


class CpuRepackWeights(Patch):
    """Keep `layer.weight`, and pack it again before the next forward pass after any `load_weights`.

    vLLM-CPU packs each linear layer's weight into a private buffer and deletes the parameter (`layers/linear.py:215`,
    `remove_weight=True`), so a later `load_weights` fails. Only keeping the parameter is silently wrong under
    trainers that do not pack again (TRL, OpenRLHF): the engine goes on with the old policy. Packing is lazy because
    TRL calls `load_weights` once per parameter.
    """

    name = "cpu_repack_weights"
    versions = ">=0.29,<0.33"
    upstream = "vllm/model_executor/layers/utils.py:dispatch_cpu_unquantized_gemm"
    removal = (
        "vLLM-CPU repacks on load_weights (test_plugin_engine.py::test_weight_sync_without_the_patch_is_lost fails)"
    )

    def needed(self) -> bool:
        """Every CPU build in the version range packs."""
        from vllm.platforms import current_platform

        return bool(current_platform.is_cpu())

    def apply(self) -> None:
        """Hook the packing function now and the CPU model runner when it is imported."""
        import vllm.model_executor.layers.utils as utils

        pack = utils.dispatch_cpu_unquantized_gemm
        if getattr(pack, "_rollspec", False):
            return

        @functools.wraps(pack)
        def keep_weight(layer: Any, remove_weight: bool) -> None:
            pack(layer, remove_weight=False)

        keep_weight._rollspec = True  # type: ignore[attr-defined]
        utils.dispatch_cpu_unquantized_gemm = keep_weight
        for runner in ("vllm.v1.worker.cpu_model_runner", "vllm.v1.worker.cpu.model_runner"):  # the first, the second
            on_import(runner, self._patch_runner)

    @staticmethod
    def _patch_runner(module: ModuleType) -> None:
        runner_cls = module.CPUModelRunner
        load_model, execute_model = runner_cls.load_model, runner_cls.execute_model

        @functools.wraps(load_model)
        def load_and_watch(self: Any, *args: Any, **kwargs: Any) -> Any:
            out = load_model(self, *args, **kwargs)
            watch(self.model)
            return out

        @functools.wraps(execute_model)
        def repack_and_execute(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.model.__dict__.get("_rollspec_stale", False):
                repack(self.model)
            return execute_model(self, *args, **kwargs)

        runner_cls.load_model = load_and_watch
        runner_cls.execute_model = repack_and_execute


def watch(model: Any) -> None:
    """Mark `model` stale whenever `model.load_weights` ran, however it ended (a failed load may have written some)."""
    load_weights = model.load_weights

    @functools.wraps(load_weights)
    def load_and_mark(*args: Any, **kwargs: Any) -> Any:
        model.__dict__["_rollspec_stale"] = True
        return load_weights(*args, **kwargs)

    model.__dict__["load_weights"] = load_and_mark
    model.__dict__["_rollspec_stale"] = False


def repack(model: Any) -> None:
    """Pack every linear layer's current weight again."""
    import vllm.model_executor.layers.utils as utils

    for layer in model.modules():
        if hasattr(layer, "cpu_linear") and getattr(layer, "weight", None) is not None and layer.weight.numel():
            utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    model.__dict__["_rollspec_stale"] = False
