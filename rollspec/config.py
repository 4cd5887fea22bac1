"""Every knob of rollspec, once: typed, described, validated.

A configuration comes from a preset name (`default`), a YAML file, a mapping, or a mapping that names a preset and
changes some of it; later layers win, and the environment and dotted overrides come last:

    RollspecConfig.load("default")
    RollspecConfig.load("my.yaml", overrides=["proposal.k_max=8"])
    RollspecConfig.load({"preset": "suffix_only", "proposal.suffix.window": 2})
    ROLLSPEC__PROPOSAL__K_MAX=8 python train.py

An unknown key is an error that names the nearest valid one: a typo must not silently leave the default in place.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from rollspec.errors import ConfigError

ENV_SWITCH = "ROLLSPEC"
ENV_PREFIX = "ROLLSPEC__"

Source: TypeAlias = "str | Path | Mapping[str, Any] | RollspecConfig | None"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class SuffixConfig(_Section):
    """Suffix drafts: what was said before, by the group's siblings, in past epochs, or anywhere."""

    max_depth: int = Field(32, ge=4, le=128, description="Depth of a suffix tree: tokens matched and drafted together.")
    siblings: bool = Field(True, description="Draft from the prompt group's other samples while they are generated.")
    past: bool = Field(True, description="Draft from earlier responses to the same prompt.")
    global_tree: bool = Field(True, description="Fall back to one tree over the latest responses to all prompts.")
    window: int = Field(3, ge=1, description="Past rounds (policy versions) of a prompt that stay in its tree.")
    spec_factor: float = Field(2.0, gt=0, description="A draft is at most this many times as long as its match.")
    min_prob: float = Field(
        0.1, gt=0, le=1, description="Stop a draft where its cumulative frequency falls below this."
    )


class BudgetConfig(_Section):
    """How much of what was proposed is verified."""

    policy: Literal["fixed", "goodput"] = Field(
        "goodput",
        description="`fixed` verifies every proposed token up to k_max; `goodput` keeps a token only while its "
        "calibrated probability of acceptance pays for the measured cost of verifying it.",
    )
    max_tokens: int | None = Field(None, ge=1, description="Most draft tokens verified in one step, over all requests.")
    length_weight: float = Field(
        1.0,
        ge=0,
        le=2,
        description="How much more a token counts for requests expected to run long, while no request waits for a "
        "place in the batch: (remaining / mean)^this (DAS). 0: all count the same.",
    )
    cut: Literal["none", "svip", "specdec++"] = Field(
        "none",
        description="Stop a draft where the drafter is unsure, by SVIP's entropy bound or SpecDec++'s threshold.",
    )
    cut_threshold: float = Field(0.7, gt=0, description="Threshold of `cut`: sqrt(nats) for svip, a probability else.")


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
    keep_bytes: int = Field(
        256 << 20,
        ge=0,
        description="Bytes of the target's hidden states kept for running requests, from which the drafter catches up "
        "after it rested and is rebuilt after its weights were replaced.",
    )
    canary_drafts: int = Field(
        64, ge=0, description="Drafts that new weights are tried for before they stay; 0 trusts them at once."
    )
    canary_ratio: float = Field(
        0.9, ge=0, description="New weights are taken back below this part of what the old ones got right."
    )
    folder: Path | None = Field(
        None, description="Folder for fresh and converted heads; unset: in history.dir, else temporary."
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


class CaptureConfig(_Section):
    """Training samples for the drafter, taken from what the target computes anyway."""

    enabled: bool = Field(
        False, description="True captures also where nothing trains in the engine (drafter.mode off)."
    )
    rate: float = Field(1.0, ge=0, le=1, description="Share of the requests that is recorded.")
    share: float = Field(
        0.02, gt=0, le=1, description="No new request is recorded while capturing takes more of the step time."
    )
    max_bytes: int = Field(256 << 20, ge=1 << 16, description="Bytes of samples held until they are drained.")
    top_k: int = Field(8, ge=0, le=64, description="Logits of the target kept per proposed token.")


class RayConfig(_Section):
    """Where in a Ray cluster the drafter's trainer is placed: what its actor asks of a node, in Ray's names."""

    num_cpus: float = Field(0.0, ge=0.0, description="CPUs that Ray reserves for it.")
    num_gpus: float | None = Field(
        None, ge=0.0, description="GPUs that Ray reserves for it; unset: one if drafter.device is a GPU."
    )
    resources: dict[str, float] = Field(
        {}, description="Custom resources that its node must have, such as `{trainer: 1}`."
    )
    scheduling_strategy: Literal["DEFAULT", "SPREAD"] = Field(
        "DEFAULT", description="`SPREAD` prefers a node on which little runs."
    )


class DrafterConfig(_Section):
    """Continual training of the learned drafter."""

    mode: Literal["off", "idle", "dedicated"] = Field(
        "off",
        description="`idle` trains inside the engine's worker while it has nothing to do; `dedicated` in a process of "
        "its own, which engines share (docs/service.md); `off` does not train.",
    )
    dir: Path | None = Field(
        None, description="Folder for buffer, checkpoints and versions; unset: in history.dir, else temporary."
    )
    endpoint: str | None = Field(
        None,
        pattern=r"^(tcp|ipc)://.+",
        description="Of `dedicated`: where `drafter-online serve` listens; unset: rollspec starts one for the job.",
    )
    token_file: Path | None = Field(
        None, description="Of `dedicated`: file with the daemon's token; unset: DRAFTER_ONLINE_TOKEN, or none."
    )
    server_key: str | None = Field(
        None, description="Of `dedicated`: the daemon's public CURVE key; set, the connection is encrypted."
    )
    device: str = Field("cpu", description="Of `dedicated`: torch device of the trainer that rollspec starts.")
    ray: RayConfig = RayConfig()
    versions: Path | None = Field(
        None,
        description="Folder of versions that several engines share: one tries a version, the others take it when it "
        "stays. What is trained here is published there, and what others trained is taken in. Unset: in `dir`, alone.",
    )
    publish_every: int = Field(100, ge=1, description="Optimiser steps after which new weights go to the engine.")
    buffer_bytes: int = Field(1 << 30, ge=1 << 16, description="Bytes of samples that are trained on.")
    buffer: dict[str, Any] = Field(
        {},
        description="What stays of them, by name: half_life, tail_quota, keep_versions and more (docs/drafter.md).",
    )
    step_bytes: int = Field(0, ge=0, description="Device memory that must be free for a training step.")
    training: dict[str, Any] = Field({}, description="Settings of the training, by name (docs/drafter.md).")
    capture: CaptureConfig = CaptureConfig()

    @field_validator("mode", mode="before")
    @classmethod
    def _plain_off(cls, value: Any) -> Any:
        return "off" if value is False else value  # what YAML makes of an off without quotes

    @property
    def captures(self) -> bool:
        """Whether samples are captured."""
        return self.capture.enabled or self.mode != "off"


class GuardConfig(_Section):
    """The collapse alarm: a drafter whose acceptance is below break-even is switched off until it would pay."""

    enabled: bool = Field(True, description="False lets a drafter go on however few of its tokens are accepted.")
    patience: int = Field(50, ge=5, description="Verify steps (and, to come back, probes) that the verdict rests on.")


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
    options: dict[str, Any] = Field({}, description="The policy's own settings, by name.")
    seed: int = Field(0, ge=0, description="Seed of the policy's draws; they decide speed, never what is sampled.")
    guard: GuardConfig = GuardConfig()


class HistoryConfig(_Section):
    """Past rollouts: kept in memory for drafting, on disk across engine restarts."""

    dir: Path | None = Field(None, description="Folder for saved history; unset keeps history in memory only.")
    max_bytes: int = Field(256 << 20, ge=1 << 16, description="Bytes of past responses kept (oldest prompts go first).")
    tree_max_bytes: int = Field(1 << 30, ge=1 << 16, description="Bytes of suffix trees kept in memory.")
    autosave: bool = Field(
        True, description="Write history to `dir` in the background when the policy version changes."
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
        "are correlated. Needs mode=coupled and reuse.seeds=keep. `lenient` is LOSSY: SPEC-RL's rule starts a rollout "
        "from a prefix of the last epoch's response, and rollouts do not follow the policy exactly (verl only).",
    )
    seeds: Literal["fresh", "keep"] = Field(
        "fresh", description="`keep`: noise does not depend on the policy version. Goes with reuse.mode=coupled."
    )
    bias: float = Field(
        0.0,
        ge=0,
        description="Of `lenient`: an old token is accepted while log U <= scale * (log p_new - log p_old + bias), in "
        "nats. More bias reuses more and distorts more; 0 is lossy too.",
    )
    scale: float = Field(1.0, gt=0, description="Of `lenient`: factor of the log-ratio; below 1 accepts more.")


class HealthConfig(_Section):
    """When training rollouts are said to look off: thresholds of one warning each, which is all that they cause."""

    max_gap: float = Field(0.1, gt=0, description="Largest mean |log p engine - log p trainer|, in nats.")
    min_corr: float = Field(0.98, le=1, description="Least correlation of engine and trainer probabilities.")
    min_ess: float = Field(
        0.9, ge=0, le=1, description="Least effective sample size of the tokens' importance weights, per token."
    )
    min_ess_sequence: float = Field(
        0.1,
        ge=0,
        le=1,
        description="The same of whole responses, per response. Rounding alone lowers it as responses get longer.",
    )
    max_outside: float = Field(
        0.05, ge=0, le=1, description="Largest share of tokens whose importance ratio is outside 0.8 to 1.25."
    )
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
    """The whole configuration. `mode` names the law of the rollout, all exact; `reuse.mode: lenient` gives that up."""

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
        s = self.proposal.suffix
        if "suffix" in self.proposal.drafters and not (s.siblings or s.past or s.global_tree):
            raise ValueError(
                "proposal.suffix has siblings, past and global_tree all false, so nothing could be drafted: "
                "set one of them, or proposal.drafters=[]"
            )
        if self.reuse.mode == "coupled" and (self.mode, self.reuse.seeds) != ("coupled", "keep"):
            raise ValueError("reuse.mode = coupled repeats past noise: set mode: coupled and reuse.seeds: keep as well")
        if self.reuse.mode == "coupled" and not self.proposal.drafters:
            raise ValueError("reuse.mode = coupled drafts old responses: proposal.drafters must not be empty")
        if self.reuse.mode == "lenient" and self.mode != "standard":
            raise ValueError("reuse.mode = lenient is lossy, which mode = coupled excludes: set mode: standard")
        if self.reuse.seeds == "keep" and self.reuse.mode != "coupled":
            raise ValueError(
                f"reuse.seeds = keep makes epochs correlated, which reuse.mode = {self.reuse.mode} excludes: set "
                "reuse.mode: coupled, or reuse.seeds: fresh"
            )
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
                f"drafter.mode = {self.drafter.mode} trains an EAGLE-3 head, and proposal.drafters = {list(drafters)} "
                "has none: add eagle3, or set drafter.mode to off"
            )
        if self.drafter.versions is not None and not {"eagle3", "draft_model"} & set(drafters):
            raise ValueError(
                f"drafter.versions = {self.drafter.versions} holds weights of a learned drafter, and "
                f"proposal.drafters = {list(drafters)} has none: add eagle3, or unset drafter.versions"
            )
        if self.drafter.training:
            from drafter_online.trainer import DrafterTraining

            _check("drafter.training", DrafterTraining, self.drafter.training)
        if self.drafter.buffer:
            from drafter_online.buffer import BufferConfig

            _check("drafter.buffer", BufferConfig, self.drafter.buffer)
        arms, k_max = self.tuning.arms, self.proposal.k_max
        if arms is not None and (not arms or len(set(arms)) != len(arms)):
            raise ValueError(f"tuning.arms = {list(arms)} must name each draft length once, and at least one")
        if bad := [k for k in arms or () if not 0 <= k <= k_max]:
            raise ValueError(
                f"tuning.arms has {bad[0]}, which is not between 0 and proposal.k_max = {k_max}: change one of the two"
            )
        if self.tuning.options or self.tuning.policy == "table":
            from rollspec.tuning.tuner import check

            try:
                check(self.tuning, k_max)
            except ConfigError as e:
                raise ValueError(str(e).removeprefix("rollspec: ").rstrip(".")) from e
        return self

    @property
    def drafter_training(self) -> dict[str, Any]:
        """`drafter.training`; where it does not say how drafts are drawn, as this engine draws them."""
        sampled = self.mode == "coupled" and self.coupled.drafts == "noise"
        return {"draft_sampling": "probabilistic" if sampled else "greedy", **self.drafter.training}

    @classmethod
    def load(
        cls,
        source: Source = None,
        *,
        overrides: Mapping[str, Any] | Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> RollspecConfig:
        """Resolve `source` (preset name, YAML path, mapping or None for `default`) and apply overrides.

        Args:
            source: what to start from.
            overrides: `{"proposal.k_max": 8}` or `["proposal.k_max=8"]`; they win over `source`.
            env: environment to read `ROLLSPEC__A__B=value` from; `os.environ` when None.

        Raises:
            ConfigError: unknown preset, file, key or a value out of range, as one sentence.
        """
        if isinstance(source, RollspecConfig):
            layers = [(source.model_dump(), "the given configuration")]
        else:
            layers = _layers(source)
        environ = os.environ if env is None else env
        env_layer = {
            k[len(ENV_PREFIX) :].lower().replace("__", "."): _parse(v)
            for k, v in environ.items()
            if k.startswith(ENV_PREFIX)
        }
        layers.append((env_layer, "the environment"))
        layers.append((_override_mapping(overrides), "the overrides"))
        merged: dict[str, Any] = {}
        for mapping, origin in layers:
            _merge(merged, _expand(mapping, origin), origin)
        try:
            return cls.model_validate(merged)
        except ValidationError as e:
            raise ConfigError(_sentence(e)) from e

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able mapping from which `load` rebuilds an equal configuration."""
        return self.model_dump(mode="json")


def _check(where: str, kind: type[BaseModel], given: Mapping[str, Any]) -> None:
    """Raises ValueError, naming the first of the settings at `where` that `kind` does not take."""
    try:
        kind(**given)
    except ValidationError as e:
        first = e.errors()[0]
        name = ".".join(str(p) for p in first["loc"])
        near = difflib.get_close_matches(name, kind.model_fields, n=1)
        if first["type"] == "extra_forbidden":
            hint = f"did you mean {near[0]!r}" if near else f"it takes {', '.join(kind.model_fields)}"
            raise ValueError(f"{where} has no setting {name!r}; {hint}") from e
        raise ValueError(f"{where}.{name} = {first['input']!r}: {first['msg'].lower()}") from e


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


def _unknown(key: str, value: Any, origin: str) -> str:
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
