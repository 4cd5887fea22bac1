"""rollspec for TRL: one line before the trainer is made, and the rollouts of a GRPO job are drafted and verified.

    import rollspec_trl; rollspec_trl.enable()               # or a preset, a YAML file, a mapping of knobs
    trainer = GRPOTrainer(..., args=GRPOConfig(use_vllm=True, vllm_mode="colocate"))

With `vllm_mode="server"` the engine is in another process, which has a switch of its own:

    ROLLSPEC=default trl vllm-serve --model MODEL            # or: ... --additional-config '{"rollspec": "default"}'

Drafts and policy versions reach every trainer that generates through TRL's `VLLMGeneration`; rewards, metrics and the
history in checkpoints are `GRPOTrainer`'s and its subclasses'.
"""

from __future__ import annotations

from rollspec.config import Source, resolve
from rollspec.engine.vllm.hooks.base import on_import
from rollspec.tested import is_tested


def enable(source: Source = "default") -> None:
    """Switch rollspec on for the trainers that this process makes from now on.

    With another version of TRL, or none, this says so in one sentence and changes nothing.

    Raises:
        ConfigError: `source` cannot be used; a typo must stop the start, not silently cost the speed-up.
    """
    from rollspec_trl import engines, generation, trainer

    config = resolve(source)
    if not is_tested("TRL"):
        return
    engines.set_config(config)
    on_import("trl.generation.vllm_generation", generation.install)
    on_import("trl.trainer.grpo_trainer", trainer.install)
