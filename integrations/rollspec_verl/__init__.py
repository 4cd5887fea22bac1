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

from rollspec.tested import is_tested

logger = logging.getLogger("rollspec")


def _register() -> None:
    import verl

    version = verl.__version__
    if not is_tested("verl", version):
        return
    try:
        from rollspec_verl import fully_async, replica, resume, reuse, servers, teacher, trainer, weights

        for part in (servers, weights, trainer, fully_async, reuse, resume, replica, teacher):
            part.register()
    except (ImportError, AttributeError) as e:
        logger.error("rollspec: verl %s is not as expected (%s), so this job runs without rollspec.", version, e)


_register()
