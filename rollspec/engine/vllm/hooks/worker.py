"""Hooks in a worker's process: before there is a model runner, and on its model, its layers and the worker itself."""

from __future__ import annotations

from typing import Any

from rollspec.engine.vllm.hooks.base import ANY, Around, Hook, RunnerHook


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


class LoadWeights(RunnerHook):
    """Weights from a trainer reach the model here."""

    name = "load_weights"
    targets = ("vllm.model_executor.models.qwen3:Qwen3ForCausalLM.load_weights",)
    by = ("install",)
    why = "counts policy versions for programs that do not set them; on the instance, whatever the model's class"
    removal = "vLLM numbers the weights it was given"


class PackedLinear(RunnerHook):
    """vLLM-CPU packs a linear layer's weight into a closure."""

    name = "cpu_linear"
    targets = ("vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",)
    by = ("draft_weights",)
    cpu_only = True
    why = "exchanges the packed weights of a head and of its second copy, between two steps"
    removal = "the swap uses vLLM's own calls for draft weights"

    @classmethod
    def exchange(cls, layer: Any, other: Any) -> None:
        """Exchange the packed weights of two layers."""
        layer.cpu_linear, other.cpu_linear = other.cpu_linear, layer.cpu_linear


class WorkerSleep(RunnerHook):
    """The engine goes to sleep: its memory is released."""

    name = "worker_sleep"
    targets = ("vllm.v1.worker.gpu_worker:Worker.sleep",)
    by = ("worker",)
    why = "waits for readers of the target's weights, and stops training and swaps"
    removal = "vLLM notifies plugins of sleep"


class WorkerWakeUp(RunnerHook):
    """The engine wakes up: its memory is back, with unknown contents."""

    name = "worker_wake_up"
    targets = ("vllm.v1.worker.gpu_worker:Worker.wake_up",)
    by = ("worker",)
    why = "verifies the head's weights before the next step"
    removal = "vLLM notifies plugins of sleep"
