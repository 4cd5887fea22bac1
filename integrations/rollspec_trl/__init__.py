"""rollspec for TRL: one line before the trainer is made, and the rollouts of a GRPO job are drafted and verified.

    import rollspec_trl; rollspec_trl.enable()               # or a preset, a YAML file, a mapping of knobs
    trainer = GRPOTrainer(..., args=GRPOConfig(use_vllm=True, vllm_mode="colocate"))

With `vllm_mode="server"` the engine is in another process, which has a switch of its own:

    ROLLSPEC=default trl vllm-serve --model MODEL            # or: ... --additional-config '{"rollspec": "default"}'

Drafts and policy versions reach every trainer that generates through TRL's `VLLMGeneration`; rewards, metrics and the
history in checkpoints are `GRPOTrainer`'s and its subclasses'.
"""

from __future__ import annotations

import logging

from rollspec.config import Source, resolve

logger = logging.getLogger("rollspec")

TESTED = ">=1.16,<1.17"
"""TRL versions whose internals the hooks were run against."""


def enable(source: Source = "default") -> None:
    """Switch rollspec on for the trainers that this process makes from now on.

    With another version of TRL, or none, this says so in one sentence and changes nothing.

    Raises:
        ConfigError: `source` cannot be used; a typo must stop the start, not silently cost the speed-up.
    """
    from rollspec_trl import generation, options, trainer

    config = resolve(source)
    problem = _unsupported()
    if problem is not None:
        logger.warning("rollspec: %s, so this job runs without rollspec; use one in it.", problem)
        return
    options.set_config(config)
    generation.register()
    trainer.register()


def _unsupported() -> str | None:
    from importlib import metadata

    from packaging.specifiers import SpecifierSet

    try:
        version = metadata.version("trl")
    except metadata.PackageNotFoundError:
        return f"TRL is not installed (the tested range is {TESTED})"
    if SpecifierSet(TESTED).contains(version, prereleases=True):
        return None
    return f"TRL {version} is outside the tested range {TESTED}"
