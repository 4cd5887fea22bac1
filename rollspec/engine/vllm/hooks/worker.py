"""Hooks in a worker's process, before there is a model runner."""

from __future__ import annotations

from typing import Any

from rollspec.engine.vllm.hooks.base import ANY, Around, Hook


class InitDevice(Hook):
    """The first call in a worker after plugins are loaded; the model runner is made in it, the model after it."""

    name = "init_device"
    targets = ("vllm.v1.worker.worker_base:WorkerWrapperBase.init_device",)
    by = ("plugin",)
    correctness = True
    why = "installs the patches before the model is loaded and its weights are packed"
    removal = "vLLM calls plugins in a worker with its configuration"


class InitializeFromConfig(Hook):
    """The last call before the first step: model and KV cache are there."""

    name = "initialize_from_config"
    targets = ("vllm.v1.worker.worker_base:WorkerWrapperBase.initialize_from_config",)
    by = ("plugin",)
    why = "attaches rollspec to the model runner"
    removal = "vLLM calls plugins in a worker that is ready"


class WorkerCall(Hook):
    """A method of ours that trainers reach by `collective_rpc("rollspec", ...)`."""

    name = "worker_call"
    targets = ("vllm.v1.worker.worker_base:WorkerBase.rollspec",)
    versions = ANY
    by = ("plugin",)
    why = "adds the method that trainers call; it answers in engines without rollspec too"
    removal = "vLLM lets a plugin add worker methods without worker_extension_cls, which trainers use themselves"

    @classmethod
    def change(cls, owner: Any, name: str, around: Around) -> None:
        """Add the method; vLLM has none of that name."""
        setattr(owner, name, around)


class AuxiliaryLayers(Hook):
    """Which layers' hidden states the target gives; asked for while the model is loaded, before it is compiled."""

    name = "auxiliary_layers"
    targets = ("vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_eagle3_aux_layers_from_config",)
    runner = "v1"
    by = ("capture",)
    why = "adds the last layer's states, which training samples need, to those that an EAGLE-3 head reads"
    removal = "with the first model runner; or vLLM has a setting for the layers"
