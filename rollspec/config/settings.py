"""The whole configuration: what its sections must agree on, and how it is resolved once where a job starts.

`resolve` alone reads files and the environment. What it returns is frozen and travels as data: `to_dict` here,
`from_dict` in every other process, so that what a job changed for one replica is not changed back there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeGuard

from pydantic import Field, model_validator

from drafter_online.recipes import RECIPES, TTT_STEPS
from rollspec.config.layers import environment, flat, knobs, layers_of, overriding, validated
from rollspec.config.sections import (
    CoupledConfig,
    DrafterConfig,
    HistoryConfig,
    ProposalConfig,
    ReuseConfig,
    Section,
    TelemetryConfig,
    TuningConfig,
)
from rollspec.errors import ConfigError

Source: TypeAlias = "str | Path | Mapping[str, Any] | RollspecConfig | None"


class RollspecConfig(Section):
    """The whole configuration. Every `mode` samples rollouts losslessly; `reuse.mode: lenient` gives that up."""

    preset: str = Field("default", description="The preset this configuration started from (provenance).")
    enabled: bool = Field(True, description="False leaves the engine exactly as it would be without rollspec.")
    mode: Literal["standard", "coupled"] = Field(
        "standard",
        description="Distribution of the rollout. `standard`: exactly the policy, by the engine's rejection sampling. "
        "`coupled`: exactly the policy, and the same tokens whatever is drafted, by seeded Gumbel noise.",
    )
    coupled: CoupledConfig = CoupledConfig()
    reuse: ReuseConfig = ReuseConfig()
    proposal: ProposalConfig = ProposalConfig()
    drafter: DrafterConfig = DrafterConfig()
    tuning: TuningConfig = TuningConfig()
    history: HistoryConfig = HistoryConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @model_validator(mode="after")
    def _consistent(self) -> RollspecConfig:
        if self.reuse.mode == "replay" and self.mode != "coupled":
            raise ValueError("reuse.mode = replay repeats past noise: set mode: coupled as well")
        if self.reuse.mode == "replay" and not self.proposal.drafters:
            raise ValueError("reuse.mode = replay drafts old responses: proposal.drafters must not be empty")
        if self.reuse.mode == "lenient" and self.mode != "standard":
            raise ValueError("reuse.mode = lenient is lossy, which mode = coupled excludes: set mode: standard")
        drafters = self.proposal.drafters
        if len(set(drafters)) != len(drafters) or len({"eagle3", "draft_model", "mtp"} & set(drafters)) > 1:
            raise ValueError(
                f"proposal.drafters = {list(drafters)} must name each drafter once, and one of eagle3, draft_model "
                "and mtp at most: remove one"
            )
        if "draft_model" in drafters and self.proposal.head.model is None:
            raise ValueError("proposal.drafters has draft_model and proposal.head.model is unset: give its folder")
        if self.drafter.mode != "off" and not {"eagle3", "draft_model"} & set(drafters):
            raise ValueError(
                f"drafter.mode = {self.drafter.mode} is for a draft head or draft model, and proposal.drafters = "
                f"{list(drafters)} has none: add eagle3 or draft_model, or set drafter.mode to off"
            )
        if (
            self.drafter.mode != "off"
            and self.drafter.training.recipe == "leap"
            and not self.proposal.head.canary_drafts
        ):
            raise ValueError(
                "drafter.training.recipe = leap publishes weights that were never trained, and "
                "proposal.head.canary_drafts = 0 lets them serve unjudged: set that above 0, or another recipe"
            )
        tuning, k_max, arms = self.tuning, self.proposal.k_max, self.tuning.arms or ()
        if len(set(arms)) != len(arms):
            raise ValueError(f"tuning.arms = {list(arms)} must name each draft length once: remove one")
        if bad := [k for k in arms if not 0 <= k <= k_max]:
            raise ValueError(
                f"tuning.arms has {bad[0]}, which is not between 0 and proposal.k_max = {k_max}: change one of the two"
            )
        table, sets = tuning.options.table, tuning.options.sets
        for name, given, strategy in (("table", table, "table"), ("sets", sets, "beg_mab")):
            if given is not None and tuning.strategy != strategy:
                raise ValueError(
                    f"tuning.options.{name} is set and tuning.strategy = {tuning.strategy}: set that to {strategy}, or "
                    "unset it"
                )
        if tuning.strategy == "table" and table is None:
            raise ValueError(
                "tuning.strategy = table needs tuning.options.table, a mapping of batch sizes to draft lengths such as "
                "{4: 8, 16: 4, 64: 0}"
            )
        if sets and not all(sets.values()):
            raise ValueError(f"tuning.options.sets = {sets} must name a draft length for every batch size: add one")
        known = tuning.lengths(k_max) if drafters else (0,)
        asked = {*(table or {}).values(), *chain(*(sets or {}).values())}
        if missing := sorted(asked - set(known)):
            raise ValueError(
                f"tuning.options.{'table' if table else 'sets'} asks for K = {missing[0]}, which is not among "
                f"tuning.arms {list(known)}: add it there"
            )
        return self

    @property
    def drafter_training(self) -> dict[str, Any]:
        """What `drafter.training` and the way this engine draws drafts are as fields of `DrafterTraining`."""
        sampled = self.mode == "coupled" and self.coupled.drafts == "noise"
        given = self.drafter.training
        rate = {} if given.learning_rate is None else {"learning_rate": given.learning_rate}
        recipe, k_max = RECIPES[given.recipe], self.proposal.head.k_max
        steps = given.ttt_steps or (k_max if "rejected" in recipe else TTT_STEPS)
        return {
            "draft_sampling": "probabilistic" if sampled else "greedy",
            "batch_tokens": given.batch_tokens,
            "ttt_steps": min(k_max, steps),
            **recipe,
            **rate,
        }

    @classmethod
    def load(cls, source: Source = None, **options: Any) -> RollspecConfig:
        """`resolve`, for programs that import this class alone."""
        return resolve(source, **options)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RollspecConfig:
        """The settings that `to_dict` wrote down, perhaps in another process. Reads no file and no environment.

        Raises:
            ConfigError: a key is missing or unknown, or a value out of range.
        """
        if missing := _missing(data):
            raise ConfigError(f"rollspec: resolved settings lack {missing[0]!r}; pass on what `to_dict` returned.")
        return validated(cls, [(dict(data), "the resolved settings")])

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able mapping with every knob, from which `from_dict` rebuilds equal settings."""
        return self.model_dump(mode="json")

    def change(self, changes: Mapping[str, Any]) -> RollspecConfig:
        """These settings with some, by dotted name, changed and checked again.

        Raises:
            ConfigError: as `resolve`.
        """
        return validated(type(self), [(self.model_dump(), "the settings"), (dict(changes), "the changes")])

    def of_replica(self, number: int) -> RollspecConfig:
        """The settings of one of a job's engines: folders of its own, so that every file has one writer."""
        own, changes = f"replica_{number}", {}
        if self.history.dir is not None:
            changes["history.dir"] = self.history.dir / own
            if self.drafter.trains and self.drafter.dir is None:
                changes["drafter.dir"] = self.history.dir / "drafter"
        if self.drafter.dir is not None and not self.drafter.trains:  # else its trainer is the job's
            changes["drafter.dir"] = self.drafter.dir / own
        return self.change(changes) if changes else self


def resolve(
    source: Source = None,
    *,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> RollspecConfig:
    """The settings of a job, weakest first: built-in values, preset, file or mapping, environment, `overrides`.

    Settings that were resolved before, as an object or as the mapping of `to_dict`, take `overrides` alone, which are
    `{"proposal.k_max": 8}` or `["proposal.k_max=8"]`. `env`: to read `ROLLSPEC__A__B=value` from; unset: `os.environ`.

    Raises:
        ConfigError: unknown preset, file, key or a value out of range, as one sentence.
    """
    if isinstance(source, RollspecConfig):
        return source.change(overriding(overrides)) if overrides else source
    if is_resolved(source):
        return resolve(RollspecConfig.from_dict(source), overrides=overrides)
    return validated(
        RollspecConfig,
        [*layers_of(source), (environment(env), "the environment"), (overriding(overrides), "the overrides")],
    )


def is_resolved(source: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether `source` is a mapping that sets every knob, as `to_dict` does: nothing is left to resolve.

    Raises:
        ConfigError: it is a mapping, and a key is unknown.
    """
    return isinstance(source, Mapping) and not _missing(source)


def _missing(data: Mapping[str, Any]) -> list[str]:
    """Knobs that `data` does not set, by dotted name."""
    given = flat(RollspecConfig, data, "the given mapping")
    return [name for name, *_ in knobs(RollspecConfig) if name not in given]
