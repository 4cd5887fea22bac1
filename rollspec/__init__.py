"""rollspec: exact speculative decoding for the rollout stage of RL post-training.

`import rollspec` is light on purpose: it needs neither vllm, verl, ray nor torch, so that a launcher, a config linter
or a login node can use it. Everything heavy is imported where it is used.

    import rollspec
    config = rollspec.RollspecConfig.load("default", overrides=["proposal.k_max=8"])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollspec.errors import RollspecError

if TYPE_CHECKING:
    from rollspec.config import RollspecConfig as RollspecConfig

__version__ = "0.1.0"

__all__ = ["RollspecConfig", "RollspecError", "__version__"]


def __getattr__(name: str) -> Any:
    if name != "RollspecConfig":
        raise AttributeError(f"module 'rollspec' has no attribute {name!r}")
    from rollspec.config import RollspecConfig

    return RollspecConfig
