"""Every knob of rollspec, once: typed, described, validated, and resolved once where a job starts.

A configuration comes from a preset, a YAML file or a mapping; the environment and dotted overrides come last:

    resolve("default")
    resolve("my.yaml", overrides=["proposal.k_max=8"])
    resolve({"preset": "suffix_only", "proposal.suffix.window": 2})
    ROLLSPEC__PROPOSAL__K_MAX=8 python train.py
"""

from rollspec.config.layers import knobs
from rollspec.config.sections import (
    BudgetConfig,
    HealthConfig,
    HistoryConfig,
    ReuseConfig,
    SuffixConfig,
    TuningConfig,
)
from rollspec.config.settings import RollspecConfig, Source, is_resolved, resolve
from rollspec.config.sources import ENV_PREFIX, ENV_SWITCH, presets, switched_on

__all__ = [
    "ENV_PREFIX",
    "ENV_SWITCH",
    "BudgetConfig",
    "HealthConfig",
    "HistoryConfig",
    "ReuseConfig",
    "RollspecConfig",
    "Source",
    "SuffixConfig",
    "TuningConfig",
    "is_resolved",
    "knobs",
    "presets",
    "resolve",
    "switched_on",
]
