"""Every knob of rollspec, once: typed, described, validated, and resolved once where a job starts.

A configuration comes from a preset, a YAML file or a mapping; the environment and dotted overrides come last:

    resolve("default")
    resolve("my.yaml", overrides=["proposal.k_max=8"])
    resolve({"preset": "suffix_only", "proposal.suffix.window": 2})
    ROLLSPEC__PROPOSAL__K_MAX=8 python train.py
"""

from rollspec.config.layers import ENV_SWITCH as ENV_SWITCH
from rollspec.config.layers import knobs as knobs
from rollspec.config.layers import presets as presets
from rollspec.config.layers import switched_on as switched_on
from rollspec.config.sections import BudgetConfig as BudgetConfig
from rollspec.config.sections import HealthConfig as HealthConfig
from rollspec.config.sections import HistoryConfig as HistoryConfig
from rollspec.config.sections import ReuseConfig as ReuseConfig
from rollspec.config.sections import TuningConfig as TuningConfig
from rollspec.config.settings import RollspecConfig as RollspecConfig
from rollspec.config.settings import Source as Source
from rollspec.config.settings import is_resolved as is_resolved
from rollspec.config.settings import resolve as resolve
