"""verl on CPU, from outside: what the demo and the tests need to run a real verl job where there is no accelerator.

verl loads this module itself through its entry-point group `verl.plugins`, in every process that imports verl, and does
something only where `VERL_PLATFORM=cpu`. It is a package of its own because importing `rollspec_verl` switches rollspec
on, which a platform must not do. It refuses to run beside CUDA: a job that should use a GPU must not end up
on a CPU because of a variable.

    env = rollspec_verl_cpu.environment()
    command = ["python", "-m", "verl.trainer.main_ppo", *rollspec_verl_cpu.overrides(), ...]
"""

from __future__ import annotations

import os
from pathlib import Path

PLATFORM = "cpu"


def cores() -> int:
    """Threads of what may have the machine for itself, as an update of the policy: all cores but never more than 8."""
    return min(os.cpu_count() or 1, 8)


def environment(threads: int | None = None, replicas: int = 1) -> dict[str, str]:
    """Environment variables of a verl job on CPU.

    `threads` pins OMP_NUM_THREADS, of each engine above all. One core fewer than there are by default, shared out
    among the `replicas`: between two steps the scheduler, the server and the agent loops run in processes of their own,
    and an OpenMP team of which one thread waits for a core waits as a whole. Trainer processes take all `cores()`
    (patches.py).
    """
    threads = threads or max(1, (cores() - 1) // replicas)
    return {
        "VERL_PLATFORM": PLATFORM,
        # FSDP engines are registered for cuda and npu only; verl's own override (workers/engine/base.py:405).
        "VERL_ENGINE_DEVICE": "cuda",
        # The engine must sample correctly and follow the policy with rollspec on and off.
        "ROLLSPEC_PATCHES": "cpu",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_USE_V2_MODEL_RUNNER": "1",  # with rollspec and without
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


def overrides(replicas: int = 1) -> list[str]:
    """Hydra overrides of a verl job on CPU; settings of the job itself (model, data, sizes) are not among them.

    `replicas`: engines that share a rollout, and ranks that train.
    """
    model = "actor_rollout_ref.model"
    return [
        # flash-attention and its padding-free batches need CUDA.
        f"+{model}.override_config.attn_implementation=sdpa",
        f"{model}.use_remove_padding=False",
        f"{model}.enable_gradient_checkpointing=False",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.use_torch_compile=False",
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
        "actor_rollout_ref.rollout.enforce_eager=True",
        # vLLM's CPU platform switches it off unless it is asked for; rollspec's engines have it, and GPU users' do.
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.async_scheduling=True",
        # vLLM's sleep mode moves weights out of GPU memory.
        "actor_rollout_ref.rollout.free_cache_engine=False",
        "+actor_rollout_ref.rollout.enable_sleep_mode=False",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=64",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "reward.num_workers=1",
        "data.dataloader_num_workers=0",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "trainer.device=cpu",
        f"trainer.n_gpus_per_node={replicas}",
        "trainer.nnodes=1",
        # Ray counts a pretended GPU: verl places its workers by that resource (vllm_async_server.py:1348).
        "ray_kwargs.ray_init.num_cpus=16",
        f"+ray_kwargs.ray_init.num_gpus={replicas}",
        "+ray_kwargs.ray_init.include_dashboard=False",
    ]


def critic_overrides() -> list[str]:
    """Further overrides for a job with a critic (PPO)."""
    return [
        "critic.strategy=fsdp2",
        "+critic.model.override_config.attn_implementation=sdpa",
        "critic.model.use_remove_padding=False",
        "critic.model.enable_gradient_checkpointing=False",
        "critic.fsdp.use_torch_compile=False",
    ]


def accelerator() -> str | None:
    """What speaks against running on CPU, or None. Does not import torch: this runs in every verl process."""
    if Path("/dev/nvidiactl").exists() or Path("/dev/nvidia0").exists():
        return "an NVIDIA device is present (/dev/nvidia*)"
    return None


def register() -> None:
    """Adapt verl in this process.

    Raises:
        RuntimeError: CUDA is present.
    """
    found = accelerator()
    if found is None:
        import torch

        if torch.cuda.is_available():
            found = f"torch {torch.__version__} sees CUDA"
    if found is not None:
        raise RuntimeError(
            f"rollspec: VERL_PLATFORM=cpu asks for verl on CPU, but {found}; unset VERL_PLATFORM to use it."
        )
    from rollspec_verl_cpu import patches, platform

    platform.register()
    patches.apply()


if os.environ.get("VERL_PLATFORM", "").lower() == PLATFORM:
    # verl loads the entry point and does not call it (verl/__init__.py:74), and swallows what it raises at DEBUG level.
    try:
        register()
    except Exception as e:
        print(e, flush=True)
        raise
