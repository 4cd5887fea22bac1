"""rollspec for OpenRLHF: one word of the command line, and the rollouts of a job are drafted and verified.

    python -m rollspec_openrlhf.train_ppo_ray ...        # in place of: python -m openrlhf.cli.train_ppo_ray ...

A preset or YAML file is named by `ROLLSPEC`, knobs by `ROLLSPEC__PROPOSAL__K_MAX=8` and the like, in the environment of
that command (with `ray job submit`, in its runtime environment). Without this package the same variable in the
environment of the engines' actors accelerates them, but nothing is measured.
"""

from __future__ import annotations

from rollspec.config import Source, resolve
from rollspec.engine.vllm.hooks.base import on_import
from rollspec.tested import is_tested


def enable(source: Source = "default") -> None:
    """Switch rollspec on for the engines that this process, the job's driver, creates from now on.

    With another version of OpenRLHF, or none, this says so in one sentence and changes nothing.

    Raises:
        ConfigError: `source` cannot be used; a typo must stop the start, not silently cost the speed-up.
    """
    from rollspec_openrlhf import actors

    config = resolve(source)
    if not is_tested("OpenRLHF"):
        return
    if config.enabled:
        on_import("openrlhf.trainer.ray.vllm_engine", lambda module: actors.install_engine(module, config))
        on_import("openrlhf.trainer.ppo_trainer", lambda module: actors.install_trainer(module, "PPOTrainer"))
        on_import("openrlhf.trainer.ppo_trainer_async", lambda module: actors.install_trainer(module, "TrainingActor"))
