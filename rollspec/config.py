"""Every knob of rollspec, once: typed, described, validated, and resolved once where a job starts.

A configuration comes from a preset name (`default`), a YAML file, a mapping, or a mapping that names a preset and
changes some of it; later layers win, and the environment and dotted overrides come last:

    resolve("default")
    resolve("my.yaml", overrides=["proposal.k_max=8"])
    resolve({"preset": "suffix_only", "proposal.suffix.window": 2})
    ROLLSPEC__PROPOSAL__K_MAX=8 python train.py

`resolve` alone reads files and the environment. What it returns is frozen and travels as data: `to_dict` here,
`from_dict` in every other process, so that what a job changed for one replica is not changed back there.

An unknown key is an error that names the nearest valid one: a typo must not silently leave the default in place.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeGuard

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from drafter_online.recipes import RECIPES
from rollspec.errors import ConfigError

ENV_SWITCH = "ROLLSPEC"
ENV_PREFIX = "ROLLSPEC__"

Source: TypeAlias = "str | Path | Mapping[str, Any] | RollspecConfig | None"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class SuffixConfig(_Section):
    """Suffix drafts: what was said before, by the group's siblings, in past epochs, or anywhere."""

    sources: tuple[Literal["siblings", "past", "global"], ...] = Field(
        ("siblings", "past", "global"),
        min_length=1,
        description="What is drafted from. `siblings`: the prompt group's other samples while they are generated. "
        "`past`: earlier responses to the same prompt. `global`: where these match little, the latest to any prompt.",
    )
    window: int = Field(3, ge=1, description="Past rounds (policy versions) of a prompt that stay in its tree.")


class BudgetConfig(_Section):
    """How much of what was proposed is verified."""

    policy: Literal["fixed", "goodput", "svip", "specdec++"] = Field(
        "goodput",
        description="`goodput` keeps a token only while its calibrated probability of acceptance pays for the measured "
        "cost of verifying it; `fixed` verifies every proposed token up to k_max; `svip` and `specdec++` every one "
        "until the drafter is unsure, by SVIP's entropy bound or SpecDec++'s threshold.",
    )
    length_weight: float = Field(
        1.0,
        ge=0,
        le=2,
        description="How much more a token counts for requests expected to run long, while no request waits for a "
        "place in the batch: (remaining / mean)^this (DAS). 0: all count the same.",
    )


class LearnedConfig(_Section):
    """A drafter with weights: an EAGLE-3 head in speculators format, or a plain draft model."""

    model: str | None = Field(
        None,
        description="Folder (or hub name) of the head or draft model; unset: a fresh EAGLE-3 head is made for the "
        "target (day-0), which earns its drafts as it is trained.",
    )
    specialists: dict[str, str] = Field(
        {},
        description="Folders of further heads by domain, of the shape of `model`: all propose, and the surest drafts.",
    )
    k_max: int = Field(4, ge=1, le=16, description="Most passes of the learned drafter in one step.")
    canary_drafts: int = Field(
        64, ge=0, description="Drafts that new weights are tried for before they stay; 0 trusts them at once."
    )


class ProposalConfig(_Section):
    """Who drafts, and how far."""

    drafters: tuple[Literal["suffix", "eagle3", "draft_model"], ...] = Field(
        ("suffix",), description="Drafters in use (one of eagle3 and draft_model at most); empty means none."
    )
    k_max: int = Field(16, ge=1, le=64, description="Longest draft of a request in one step, in tokens.")
    suffix: SuffixConfig = SuffixConfig()
    learned: LearnedConfig = LearnedConfig()
    budget: BudgetConfig = BudgetConfig()


MOST_TRAINED = 8
"""Most drafted positions that a head is trained for (`DrafterTraining.ttt_steps`): each costs a pass of training."""


class CaptureConfig(_Section):
    """Training samples for the drafter, taken from what the target computes anyway."""

    share: float = Field(
        0.02, gt=0, le=1, description="No new request is recorded while capturing takes more of the step time."
    )


class TrainingConfig(_Section):
    """How the head is trained: by a recipe, one of `drafter_online.recipes`, at a pace that suits head and machine."""

    recipe: Literal["kl", "matched", "aurora", "osd", "respec"] = Field(
        "kl",
        description="`kl`: KL divergence on emitted tokens; `matched`: top1 where drafts are greedy, lk_hybrid where "
        "sampled; `aurora`, `osd`, `respec`: as these systems train (docs/drafter.md).",
    )
    learning_rate: float | None = Field(
        None, gt=0, description="Of AdamW, constant after warm-up; unset: the recipe's (1e-3; aurora and osd 1e-5)."
    )
    batch_tokens: int = Field(2048, ge=16, description="Tokens packed into one micro-step.")


class RayConfig(_Section):
    """Where in a Ray cluster the drafter's trainer is placed. Its actor asks for one GPU if drafter.device is one."""

    resources: dict[str, float] = Field(
        {}, description="Custom resources that its node must have, such as `{trainer: 1}`."
    )


class DrafterConfig(_Section):
    """Continual training of the learned drafter."""

    mode: Literal["off", "capture", "idle", "dedicated"] = Field(
        "off",
        description="`idle` trains inside the engine's worker while it has nothing to do; `dedicated` in a process of "
        "its own, which engines share (docs/service.md); `capture` records samples and trains nothing; `off` neither.",
    )
    dir: Path | None = Field(
        None,
        description="Folder for buffer, checkpoints, versions, and for fresh and converted heads; unset: in "
        "history.dir, else temporary.",
    )
    endpoint: str | None = Field(
        None,
        pattern=r"^(tcp|ipc)://.+",
        description="Of `dedicated`: where `drafter-online serve` listens; unset: rollspec starts one for the job.",
    )
    token_file: Path | None = Field(
        None, description="Of `dedicated`: file with the daemon's token; unset: DRAFTER_ONLINE_TOKEN, or none."
    )
    device: str = Field("cpu", description="Of `dedicated`: torch device of the trainer that rollspec starts.")
    ray: RayConfig = RayConfig()
    versions: Path | None = Field(
        None,
        description="Folder of versions that several engines share: one tries a version, the others take it when "
        "it is promoted. One of them trains, and publishes there. Unset: in `dir`, alone.",
    )
    publish_every: int = Field(100, ge=1, description="Optimiser steps after which new weights go to the engine.")
    buffer_bytes: int = Field(1 << 30, ge=1 << 16, description="Bytes of samples that are trained on.")
    training: TrainingConfig = TrainingConfig()
    capture: CaptureConfig = CaptureConfig()

    @field_validator("mode", mode="before")
    @classmethod
    def _plain_off(cls, value: Any) -> Any:
        return "off" if value is False else value  # what YAML makes of an off without quotes

    @property
    def captures(self) -> bool:
        """Whether samples are captured."""
        return self.mode != "off"

    @property
    def trains(self) -> bool:
        """Whether a trainer is fed."""
        return self.mode in ("idle", "dedicated")


class GuardConfig(_Section):
    """The collapse alarm: a drafter whose acceptance is below break-even is switched off until it would pay."""

    enabled: bool = Field(True, description="False lets a drafter go on however few of its tokens are accepted.")


class PolicyConfig(_Section):
    """Of single policies; the parameters of the published bandits are those of their papers (docs/tuning.md)."""

    table: dict[int, int] | None = Field(
        None, description="Of `table`: draft length by the batch size up to which it holds, such as {4: 8, 64: 0}."
    )


class TuningConfig(_Section):
    """How much is drafted: the policy that chooses an arm (drafters, K) per step and batch bucket."""

    policy: Literal["hedge", "static", "table", "random", "ucbspec", "exp3spec", "beg_mab", "thompson"] = Field(
        "hedge",
        description="`hedge`: discounted full-information Hedge over measured goodput. `static`: longest of `arms`. "
        "`table`: `options.table`. `random`: any arm at any step. The others are published bandits (docs/tuning.md).",
    )
    arms: tuple[int, ...] | None = Field(
        None, description="Draft lengths K to choose from, 0 for none; unset: 0, 1, 2, 4, ... up to proposal.k_max."
    )
    options: PolicyConfig = PolicyConfig()
    guard: GuardConfig = GuardConfig()

    def lengths(self, k_max: int) -> tuple[int, ...]:
        """The draft lengths to choose from, ascending: `arms`, or 0, the powers of two and `k_max`."""
        ks = self.arms if self.arms is not None else (0, *(1 << i for i in range(k_max.bit_length())), k_max)
        return tuple(sorted(set(ks)))


class HistoryConfig(_Section):
    """Past rollouts: kept in memory for drafting, on disk across engine restarts."""

    dir: Path | None = Field(None, description="Folder for saved history; unset keeps history in memory only.")
    max_bytes: int = Field(
        256 << 20,
        ge=1 << 16,
        description="Bytes of past responses kept (oldest prompts go first). What suffix drafts are looked up in may "
        "take four times as many.",
    )


class CoupledConfig(_Section):
    """Noise of `mode: coupled`."""

    seed: int = Field(
        0,
        ge=0,
        description="The run's seed: with the same one, the same engine seeds and policies, tokens are the same. "
        "Engines that sample siblings of one prompt must differ in vLLM's own seed, as trainers make them.",
    )
    drafts: Literal["noise", "greedy"] = Field(
        "noise",
        description="What a learned drafter proposes: `noise`: argmax(its logits / T + the noise of the next token), "
        "which agrees with the target as far as their laws do; `greedy`: its likeliest token, accepted with at most "
        "max p. Either way the text is the same.",
    )


class ReuseConfig(_Section):
    """What past rollouts may do besides being drafted from."""

    mode: Literal["independent", "coupled", "lenient"] = Field(
        "independent",
        description="`independent`: each epoch's randomness is fresh. `coupled`: a sample keeps its noise over epochs "
        "and repeats its old response while the new policy's choice agrees; each epoch is exact by itself, but epochs "
        "are correlated. Needs mode=coupled. `lenient` is LOSSY: SPEC-RL's rule starts a rollout "
        "from a prefix of the last epoch's response, and rollouts do not follow the policy exactly (verl only).",
    )
    bias: float = Field(
        0.0,
        ge=0,
        description="Of `lenient`: an old token is accepted while log U <= log p_new - log p_old + bias, in nats. More "
        "bias reuses more and distorts more; 0 is lossy too.",
    )

    @property
    def seeds(self) -> Literal["fresh", "keep"]:
        """`keep` where noise does not depend on the policy version."""
        return "keep" if self.mode == "coupled" else "fresh"


class HealthConfig(_Section):
    """When training rollouts are said to look off: one warning each, which is all that is caused."""

    max_overlap: float = Field(
        0.2,
        ge=0,
        le=1,
        description="Largest share of tokens, beyond chance, in prefixes that repeat the last epoch's response.",
    )


class TelemetryConfig(_Section):
    """Where measurements go besides the trainer's own logger, and when they are worth a warning."""

    jsonl: Path | None = Field(None, description="Append one JSON object per drained interval to this file.")
    health: HealthConfig = HealthConfig()


class RollspecConfig(_Section):
    """The whole configuration. Every `mode` samples rollouts losslessly; `reuse.mode: lenient` gives that up."""

    preset: str = Field("default", description="The preset this configuration started from (provenance).")
    enabled: bool = Field(True, description="False leaves the engine exactly as it would be without rollspec.")
    mode: Literal["standard", "coupled"] = Field(
        "standard",
        description="Law of the rollout. `standard`: exactly the policy, by the engine's rejection sampling. "
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
        if self.reuse.mode == "coupled" and self.mode != "coupled":
            raise ValueError("reuse.mode = coupled repeats past noise: set mode: coupled as well")
        if self.reuse.mode == "coupled" and not self.proposal.drafters:
            raise ValueError("reuse.mode = coupled drafts old responses: proposal.drafters must not be empty")
        if self.reuse.mode == "lenient" and self.mode != "standard":
            raise ValueError("reuse.mode = lenient is lossy, which mode = coupled excludes: set mode: standard")
        drafters = self.proposal.drafters
        if len(set(drafters)) != len(drafters) or {"eagle3", "draft_model"} <= set(drafters):
            raise ValueError(
                f"proposal.drafters = {list(drafters)} must name each drafter once, and one of eagle3 and draft_model "
                "at most: remove one"
            )
        if "draft_model" in drafters and self.proposal.learned.model is None:
            raise ValueError("proposal.drafters has draft_model and proposal.learned.model is unset: give its folder")
        if self.drafter.mode != "off" and "eagle3" not in drafters:
            raise ValueError(
                f"drafter.mode = {self.drafter.mode} is for an EAGLE-3 head, and proposal.drafters = {list(drafters)} "
                "has none: add eagle3, or set drafter.mode to off"
            )
        if self.drafter.versions is not None and not {"eagle3", "draft_model"} & set(drafters):
            raise ValueError(
                f"drafter.versions = {self.drafter.versions} holds weights of a learned drafter, and "
                f"proposal.drafters = {list(drafters)} has none: add eagle3, or unset drafter.versions"
            )
        arms, k_max = self.tuning.arms, self.proposal.k_max
        if arms is not None and (not arms or len(set(arms)) != len(arms)):
            raise ValueError(f"tuning.arms = {list(arms)} must name each draft length once, and at least one")
        if bad := [k for k in arms or () if not 0 <= k <= k_max]:
            raise ValueError(
                f"tuning.arms has {bad[0]}, which is not between 0 and proposal.k_max = {k_max}: change one of the two"
            )
        if (table := self.tuning.options.table) is not None and self.tuning.policy != "table":
            raise ValueError(
                f"tuning.options.table is set and tuning.policy = {self.tuning.policy}: set that to table, or unset it"
            )
        if self.tuning.policy == "table":
            if not table:
                raise ValueError(
                    "tuning.policy = table needs tuning.options.table, a mapping of batch sizes to draft lengths such "
                    "as {4: 8, 16: 4, 64: 0}"
                )
            known = self.tuning.lengths(k_max)
            if missing := sorted(set(table.values()) - set(known)):
                raise ValueError(
                    f"tuning.options.table asks for K = {missing[0]}, which is not among tuning.arms {list(known)}: "
                    "add it there"
                )
        return self

    @property
    def drafter_training(self) -> dict[str, Any]:
        """What `drafter.training` and the way this engine draws drafts are as fields of `DrafterTraining`."""
        sampled = self.mode == "coupled" and self.coupled.drafts == "noise"
        given = self.drafter.training
        rate = {} if given.learning_rate is None else {"learning_rate": given.learning_rate}
        return {
            "draft_sampling": "probabilistic" if sampled else "greedy",
            "batch_tokens": given.batch_tokens,
            "ttt_steps": min(self.proposal.learned.k_max, MOST_TRAINED),
            **RECIPES[given.recipe],
            **rate,
        }

    @classmethod
    def load(
        cls,
        source: Source = None,
        *,
        overrides: Mapping[str, Any] | Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> RollspecConfig:
        """`resolve`, for programs that import this class alone."""
        return resolve(source, overrides=overrides, env=env)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RollspecConfig:
        """The settings that `to_dict` wrote down, perhaps in another process. Reads no file and no environment.

        Raises:
            ConfigError: a key is missing or unknown, or a value out of range.
        """
        if missing := next(_missing(data), None):
            raise ConfigError(f"rollspec: resolved settings lack {missing!r}; pass on what `to_dict` returned.")
        return _made([(dict(data), "the resolved settings")])

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able mapping with every knob, from which `from_dict` rebuilds equal settings."""
        return self.model_dump(mode="json")

    def change(self, changes: Mapping[str, Any]) -> RollspecConfig:
        """These settings with some, by dotted name, changed and checked again.

        Raises:
            ConfigError: as `resolve`.
        """
        return _made([(self.model_dump(), "the settings"), (dict(changes), "the changes")])

    def of_replica(self, number: int) -> RollspecConfig:
        """The settings of one of a job's engines: folders of its own, so that every file has one writer."""
        own, changes = f"replica_{number}", {}
        if self.history.dir is not None:
            changes["history.dir"] = self.history.dir / own
        if self.drafter.dir is not None and self.drafter.mode != "dedicated":  # that trainer is the job's
            changes["drafter.dir"] = self.drafter.dir / own
        return self.change(changes) if changes else self


def resolve(
    source: Source = None,
    *,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> RollspecConfig:
    """The settings of a job, from all that may set them; to be called once, in the process that starts the job.

    Weakest first: built-in values, preset, file or mapping (a trainer's own options are a mapping), environment,
    `overrides`. Settings that were resolved before, as an object or as the mapping of `to_dict`, have met the
    environment already and take `overrides` alone.

    Args:
        source: a preset's name, a path to a YAML file, a mapping, or None for `default`.
        overrides: `{"proposal.k_max": 8}` or `["proposal.k_max=8"]`.
        env: environment to read `ROLLSPEC__A__B=value` from; `os.environ` when None.

    Raises:
        ConfigError: unknown preset, file, key or a value out of range, as one sentence.
    """
    if isinstance(source, RollspecConfig):
        return source.change(_override_mapping(overrides)) if overrides else source
    if is_resolved(source):
        return resolve(RollspecConfig.from_dict(source), overrides=overrides)
    environ = os.environ if env is None else env
    set_there = {
        k[len(ENV_PREFIX) :].lower().replace("__", "."): _parse(v)
        for k, v in environ.items()
        if k.startswith(ENV_PREFIX)
    }
    return _made(
        [
            *_layers(source),
            (set_there, "the environment"),
            (_override_mapping(overrides), "the overrides"),
        ]
    )


def switched_on(env: Mapping[str, str] | None = None) -> str | None:
    """The preset or file that `ROLLSPEC` names for every engine of a program; None where it is not set."""
    return (os.environ if env is None else env).get(ENV_SWITCH) or None


def is_resolved(source: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether `source` is a mapping that sets every knob, as `to_dict` does: nothing is left to resolve."""
    return isinstance(source, Mapping) and next(_missing(source), None) is None


def _missing(data: Mapping[str, Any]) -> Iterator[str]:
    """Knobs that `data` does not set, by dotted name."""
    for name, *_ in knobs():
        value: Any = data
        for part in name.split("."):
            if not isinstance(value, Mapping) or part not in value:
                yield name
                break
            value = value[part]


def _made(layers: Sequence[tuple[dict[str, Any], str]]) -> RollspecConfig:
    """The settings of layers, the weakest first, each a mapping and where it is from."""
    merged: dict[str, Any] = {}
    for mapping, origin in layers:
        _merge(merged, _expand(mapping, origin), origin)
    try:
        return RollspecConfig.model_validate(merged)
    except ValidationError as e:
        raise ConfigError(_sentence(e)) from e


def presets() -> dict[str, Path]:
    """Preset names and their files: the packaged ones, or those of the source tree when run from a checkout."""
    here = Path(__file__).resolve().parent
    for folder in (here.parent / "configs", here / "_presets"):
        if folder.is_dir():
            return {p.stem: p for p in sorted(folder.glob("*.yaml"))}
    return {}


def knobs(section: type[BaseModel] = RollspecConfig, prefix: str = "") -> Iterator[tuple[str, str, Any, str]]:
    """Every knob as (dotted name, type, default, description), for documentation and for nearest-name hints."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from knobs(kind, f"{prefix}{name}.")
        else:
            text = getattr(kind, "__name__", None) if isinstance(kind, type) else str(kind).replace("typing.", "")
            yield f"{prefix}{name}", text or str(kind), field.default, field.description or ""


def _layers(source: str | Path | Mapping[str, Any] | None) -> list[tuple[dict[str, Any], str]]:
    if source is None:
        source = "default"
    if isinstance(source, Mapping):
        data = dict(source)
        base = data.pop("preset", None)
        return [*(_layers(base) if base is not None else []), (data, "the given mapping")]
    text = str(source)
    known = presets()
    if text in known:
        return [({**_read_yaml(known[text]), "preset": text}, f"preset {text!r}")]
    path = Path(text)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        if not path.is_file():
            raise ConfigError(f"rollspec: the configuration file {text!r} does not exist; give a path to a YAML file.")
        data = _read_yaml(path)
        base = data.pop("preset", None)
        return [*(_layers(base) if base is not None else []), (data, str(path))]
    near = difflib.get_close_matches(text, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(f"rollspec: there is no preset {text!r}; {hint}choose one of {', '.join(known)} or a YAML file.")


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as e:
        raise ConfigError(f"rollspec: {path} cannot be read as YAML ({' '.join(str(e).split())}); fix the file.") from e
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"rollspec: {path} holds {type(data).__name__}, not a mapping of keys to values.")
    return data


def _override_mapping(overrides: Mapping[str, Any] | Sequence[str]) -> dict[str, Any]:
    if isinstance(overrides, Mapping):
        return dict(overrides)
    out: dict[str, Any] = {}
    for item in overrides:
        key, eq, value = item.partition("=")
        if not eq:
            raise ConfigError(f"rollspec: the override {item!r} has no '='; write key.sub=value.")
        out[key.strip()] = _parse(value)
    return out


def _parse(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _expand(mapping: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """`{"a.b": 1}` and `{"a": {"b": 1}}` become the same nested dict."""
    out: dict[str, Any] = {}
    for key, value in mapping.items():
        node = out
        *parents, leaf = str(key).split(".")
        for part in parents:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise ConfigError(f"rollspec: {key!r} in {origin} is set both as a value and as a section.")
        if isinstance(value, Mapping):
            value = _expand(value, origin)
            if isinstance(node.get(leaf), dict):
                _deepen(node[leaf], value)
                continue
        node[leaf] = value
    return out


def _deepen(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    for key, value in new.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _deepen(into[key], value)
        else:
            into[key] = value


def _merge(into: dict[str, Any], new: Mapping[str, Any], origin: str, prefix: str = "") -> None:
    """Deep-merge `new` over `into`, refusing keys that no knob has."""
    section = _section_at(prefix)
    for key, value in new.items():
        if section is not None and key not in section.model_fields:
            raise ConfigError(_unknown(f"{prefix}{key}", value, origin))
        if isinstance(value, Mapping) and _section_at(f"{prefix}{key}.") is not None:
            child = into.setdefault(key, {})
            _merge(child, value, origin, f"{prefix}{key}.")
        else:
            into[key] = value


def _section_at(prefix: str) -> type[BaseModel] | None:
    section: type[BaseModel] = RollspecConfig
    for part in prefix.split(".")[:-1]:
        field = section.model_fields.get(part)
        kind = field.annotation if field else None
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            return None
        section = kind
    return section


GONE: dict[str, str] = {
    "reuse.seeds": "noise is kept over epochs exactly where reuse.mode is coupled",
    "reuse.scale": "the ratio of probabilities counts as it is, as in SPEC-RL; reuse.bias decides how much is reused",
    **dict.fromkeys(
        (f"proposal.suffix.{name}" for name in ("siblings", "past", "global_tree")),
        "name in proposal.suffix.sources what is drafted from: siblings, past, global",
    ),
    "proposal.suffix.max_depth": "16 tokens of context are matched",
    "proposal.suffix.spec_factor": "a draft is at most twice as long as its match",
    "proposal.suffix.min_prob": "a draft ends where its cumulative frequency falls below 0.1",
    "proposal.learned.keep_bytes": "256 MiB of hidden states are kept",
    "proposal.learned.folder": "fresh and converted heads are in drafter.dir",
    "proposal.learned.canary_ratio": "new weights are rolled back below 0.9 of what the old ones got right; "
    "proposal.learned.canary_drafts = 0 trusts all",
    "proposal.budget.max_tokens": "proposal.budget.policy: goodput bounds a step by what it costs",
    "proposal.budget.cut": "proposal.budget.policy may be svip or specdec++",
    "proposal.budget.cut_threshold": "svip and specdec++ of proposal.budget.policy have a threshold each of their own",
    "drafter.ray.num_cpus": "Ray reserves no CPU for the trainer; drafter.ray.resources says where it may run",
    "drafter.ray.num_gpus": "Ray reserves one GPU where drafter.device is one",
    "drafter.ray.scheduling_strategy": "drafter.ray.resources says where the trainer may run",
    "drafter.step_bytes": "a training step that finds no memory is tried again with less",
    "drafter.capture.enabled": "drafter.mode: capture records samples where nothing trains",
    "drafter.capture.rate": "every request is recorded while drafter.capture.share of the step time allows it",
    "drafter.capture.max_bytes": "256 MiB of samples are held until they are drained",
    "drafter.capture.top_k": "8 logits of the target are kept per proposed token",
    "tuning.seed": "it is 0, and decides speed alone",
    "tuning.guard.patience": "a verdict rests on 50 verify steps",
    "history.autosave": "what has a history.dir is saved there; unset that to save nothing",
    "history.tree_max_bytes": "it is four times history.max_bytes",
    **dict.fromkeys(
        (f"telemetry.health.{name}" for name in ("max_gap", "min_corr", "min_ess", "min_ess_sequence", "max_outside")),
        "the limits are in rollspec/telemetry/health.py, and crossing one is a warning and nothing else",
    ),
    **dict.fromkeys(
        (f"drafter.buffer.{name}" for name in ("half_life", "keep_versions", "tail_quota", "tail_versions", "seed")),
        "the samples of a job age as drafter_online.buffer.BufferConfig has it",
    ),
    "drafter.buffer.max_bytes": "set drafter.buffer_bytes",
    "drafter.training.draft_sampling": "it follows mode and coupled.drafts",
    "drafter.training.objective": "drafter.training.recipe is kl, matched, or a published one",
    "drafter.training.accept": "drafter.training.recipe: osd trains on rejected proposals alone",
    "drafter.training.rejected": "drafter.training.recipe: aurora and osd train on rejected proposals",
    "drafter.training.reward_beta": "drafter.training.recipe: respec weighs by reward",
    **dict.fromkeys(
        (f"drafter.training.{name}" for name in (
            "step_decay", "ttt_steps", "warmup_steps", "clip_norm", "window_tokens",
            "betas", "weight_decay", "accumulate", "precision", "train_lm_head", "max_bad_steps", "checkpoint_every",
            "seed", "induced", "gamma", "rejected_from", "reward_clip", "match_temperature",
        )),
        "a job trains as drafter.training.recipe has it, and else with the default of "
        "drafter_online.trainer.DrafterTraining",
    ),
    "tuning.options.half_life": "hedge learns over half-lives of 16, 64 and 256 steps",
    **dict.fromkeys(
        (f"tuning.options.{name}" for name in ("reward", "delta", "epsilon", "window", "sets", "alpha", "beta")),
        "published policies are played with the numbers of their papers",
    ),
}  # fmt: skip
"""Knobs that there were, and what is in the place of each."""


def _unknown(key: str, value: Any, origin: str) -> str:
    if isinstance(value, Mapping) and (leaf := next((k for k in value if f"{key}.{k}" in GONE), None)) is not None:
        return _unknown(f"{key}.{leaf}", value[leaf], origin)  # of a section that is gone
    if key in GONE:
        return f"rollspec: {key!r} (value {value!r}) in {origin} is gone; {GONE[key]}."
    names = [name for name, *_ in knobs()]
    # A user who writes only the leaf ("k_max") should still be led to the full name.
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.6) or [
        n for n in names if n.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]
    ]
    hint = f"did you mean {near[0]!r}?" if near else "run `rollspec config` for the list."
    return f"rollspec: unknown key {key!r} (value {value!r}) in {origin}; {hint}"


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(p) for p in first["loc"]) or "the configuration"
    message = first["msg"].removeprefix("Value error, ")
    value = "" if not first["loc"] else f" = {first['input']!r}"
    return f"rollspec: {where}{value} cannot be used: {message}."
