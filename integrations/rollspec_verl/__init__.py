"""rollspec for verl: one line, and the rollouts of a GRPO or PPO job are drafted and verified.

    python -m verl.trainer.main_ppo ... actor_rollout_ref.model.external_lib=rollspec_verl

Options go under `rollout.custom.rollspec` (a preset's name, or any knob of `rollspec config`):

    +actor_rollout_ref.rollout.custom.rollspec=suffix_only
    '+actor_rollout_ref.rollout.custom.rollspec={preset:default,proposal:{k_max:8}}'
    +actor_rollout_ref.rollout.custom.rollspec.enabled=false

verl imports `external_lib` in every process that builds a model config (`HFModelConfig.__post_init__`,
verl/workers/config/model.py:149); importing this package registers the hooks. The engine's own processes need not
import it: rollspec's vLLM plugin reaches them through `additional_config`.
"""

from __future__ import annotations

import logging

from rollspec.engine.vllm.hooks.base import on_import
from rollspec.tested import is_tested

logger = logging.getLogger("rollspec")


def _register() -> None:
    import verl

    version = verl.__version__
    if not is_tested("verl", version):
        return
    try:
        from rollspec_verl import fully_async, replica, resume, reuse, servers, teacher, trainer

        hooked = {  # in the task runner
            "verl.checkpoint_engine.base": servers.install,
            "verl.trainer.ppo.v1.trainer_base": trainer.install,
            "verl.trainer.main_ppo_v0": trainer.legacy,
            "verl.experimental.fully_async_policy.fully_async_rollouter": fully_async.install,
            # in the workers of the agent loops
            "verl.experimental.agent_loop.agent_loop": reuse.install,
            "verl.experimental.agent_loop.single_turn_agent_loop": reuse.install_single,
            "verl.workers.rollout.llm_server": resume.install,
            # where servers are made
            "verl.workers.rollout.replica": replica.install,
            # in the workers that train
            "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer": servers.install_sender,
            "verl.workers.engine_workers": teacher.install,
            "verl.workers.engine.fsdp.transformer_impl": teacher.install_engine,
        }
        for module, install in hooked.items():
            on_import(module, install)  # where it is, or will be, imported
    except (ImportError, AttributeError) as e:
        logger.error("rollspec: verl %s is not as expected (%s), so this job runs without rollspec.", version, e)


_register()
