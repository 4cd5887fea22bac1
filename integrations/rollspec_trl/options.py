"""The configuration that `enable` was given, as this process's engine gets it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rollspec.config import RollspecConfig
from rollspec.engine.vllm import plugin

logger = logging.getLogger("rollspec")

_config = RollspecConfig(enabled=False)


def set_config(config: RollspecConfig) -> None:
    """Engines of this process are built with `config` from now on; each rank of a job has its own history folder."""
    global _config
    _config = config.of_replica(int(os.environ.get("RANK", "0")))
    plugin.enable(_config)


def config() -> RollspecConfig:
    """What `enable` was given."""
    return _config


@contextmanager
def for_engine(generation: Any) -> Iterator[None]:
    """While TRL builds its engine in this process: leave it as it is if vLLM would refuse its requests otherwise."""
    reason = refused(generation)
    if reason is None or not _config.enabled or generation.mode != "colocate":
        yield
        return
    logger.warning("rollspec: this engine runs without speculation because %s.", reason)
    plugin.enable({"off": reason})
    try:
        yield
    finally:
        plugin.enable(_config)


def refused(generation: Any) -> str | None:
    """Why vLLM would refuse the job's requests if it speculated (vllm/sampling_params.py, `_validate_spec_decode`)."""
    more = generation.generation_kwargs
    if more.get("min_p", generation.min_p):
        return "min_p was set, which vLLM refuses when it speculates; leave it out to speculate"
    if more.get("logit_bias"):
        return "generation_kwargs has logit_bias, which vLLM refuses when it speculates; leave it out to speculate"
    return None
