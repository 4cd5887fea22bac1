"""Every knob but the topmost ones: typed, described, validated, in sections that a configuration nests.

A knob is one field: its type and bounds refuse what cannot work, its description is a sentence of `rollspec config`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator


class Section(BaseModel):
    """Frozen, checked, and closed to keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class SuffixConfig(Section):
    """Suffix drafts: from the text of the group's siblings, of past epochs, or of any request."""

    sources: tuple[Literal["siblings", "past", "global"], ...] = Field(
        ("siblings", "past", "global"),
        min_length=1,
        description="What is drafted from. `siblings`: the prompt group's other samples while they are generated. "
        "`past`: earlier responses to the same prompt. `global`: where these match little, the latest to any prompt.",
    )
    window: int = Field(
        3,
        ge=1,
        description="Past rounds of a prompt that stay in its corpus: policy versions that sampled it, one per epoch.",
    )


class BudgetConfig(Section):
    """How much of what was proposed is verified."""

    rule: Literal["fixed", "goodput", "tetris", "svip", "specdec++", "disco", "eesd", "ucbspec", "exp3spec"] = Field(
        "goodput",
        description="`goodput` keeps a token only while its calibrated probability of acceptance pays for the measured "
        "cost of verifying it; `fixed` verifies every proposed token up to k_max; `svip` and `specdec++` every one "
        "until the drafter is unsure, by SVIP's entropy bound or SpecDec++'s threshold; `disco` until a regressor that "
        "learns from what is accepted expects a rejection, `eesd` until Thompson sampling says so; `ucbspec` and "
        "`exp3spec` as many as BanditSpec's bandit of the prompt chooses; `tetris` the likeliest of the batch.",
    )
    length_weight: float = Field(
        1.0,
        ge=0,
        le=2,
        description="How much more a token counts for requests expected to run long, while no request waits for a "
        "slot in the batch: (remaining / mean)^this (DAS). 0: all count the same.",
    )


class ModelDrafterConfig(Section):
    """A drafter with weights: an EAGLE-3 head in speculators format, or a plain draft model."""

    model: str | None = Field(
        None,
        description="Folder (or hub name) of the head or draft model; unset: a fresh EAGLE-3 head is made for the "
        "target (day-0), which earns its drafts as it is trained.",
    )
    specialists: dict[str, str] = Field(
        {},
        description="Folders of further heads or draft models by domain, of the shape of `model`.",
    )
    route: Literal["confidence", "domain"] = Field(
        "confidence",
        description="Which of `model` and `specialists` drafts for a request: with `confidence` all propose and the "
        "most confident one drafts (TAPS); with `domain` the one of the request's domain, else `model` (OSD).",
    )
    k_max: int = Field(
        8,
        ge=1,
        le=16,
        description="Most passes of the draft head in one step; fewer are run where more do not pay. A head is trained "
        "for `drafter.training.ttt_steps` of them.",
    )
    canary_drafts: int = Field(
        64, ge=0, description="Drafts that a canary of new weights takes; 0 promotes them at once."
    )


class ProposalConfig(Section):
    """Who drafts, and how far."""

    drafters: tuple[
        Literal["suffix", "token_recycling", "stand", "consensus", "hierarchy", "eagle3", "draft_model", "mtp"], ...
    ] = Field(
        ("suffix",),
        description="Drafters in use, asked in this order (one of eagle3, draft_model and mtp at most); empty means "
        "none. `token_recycling`, `stand`, `consensus` and `hierarchy` are published ones (docs/comparison.md).",
    )
    k_max: int = Field(16, ge=1, le=64, description="Longest draft of a request in one step, in tokens.")
    suffix: SuffixConfig = SuffixConfig()
    head: ModelDrafterConfig = ModelDrafterConfig()
    budget: BudgetConfig = BudgetConfig()


class CaptureConfig(Section):
    """Training samples for the drafter, taken from what the target computes anyway."""

    share: float = Field(
        0.02,
        gt=0,
        le=1,
        description="Share of the step time (`policy`: the job's) that capturing may take; beyond it nothing is kept.",
    )


class TrainingConfig(Section):
    """How the head is trained: by a recipe, one of `drafter_online.recipes`, at a pace that suits head and machine."""

    recipe: Literal["kl", "matched", "aurora", "osd", "respec", "leap"] = Field(
        "kl",
        description="`kl`: KL divergence on emitted tokens; `matched`: top1 where drafts are greedy, lk_hybrid where "
        "sampled; `aurora`, `osd`, `respec`: as these systems train; `leap`: as `kl`, and weights extrapolated to the "
        "next version are published, as Leap+Verify does (docs/drafter.md).",
    )
    learning_rate: float | None = Field(
        None, gt=0, description="Of AdamW, constant after warm-up; unset: the recipe's (1e-3; aurora and osd 1e-5)."
    )
    batch_tokens: int = Field(2048, ge=16, description="Tokens packed into one micro-step.")
    ttt_steps: int | None = Field(
        None,
        ge=1,
        le=8,
        description="Drafted tokens that a head is trained for, each a pass of training; `head.k_max` at most. "
        "Unset: 4, and k_max where the recipe learns from rejected tokens (aurora, osd).",
    )


class RayConfig(Section):
    """Where in a Ray cluster the drafter's trainer is placed. Its actor asks for one GPU if drafter.device is one."""

    resources: dict[str, float] = Field(
        {}, description="Custom resources that its node must have, such as `{trainer: 1}`."
    )


class DrafterConfig(Section):
    """Continual training of the draft head."""

    mode: Literal["off", "capture", "idle", "dedicated", "policy"] = Field(
        "off",
        description="Trains the head in a process that the job's engines share: `dedicated` on a device of its own "
        "(docs/service.md), `idle` on an engine's, while that engine has nothing to do, `policy` as `dedicated`, on "
        "the hidden states of the policy's training pass instead of the engines' (verl). `capture` records samples "
        "and trains nothing; `off` neither.",
    )
    dir: Path | None = Field(
        None,
        description="Folder for buffer, checkpoints, versions, and for fresh and converted heads; unset: in "
        "history.dir, else temporary.",
    )
    endpoint: str | None = Field(
        None,
        pattern=r"^(tcp|ipc)://.+",
        description="Where `drafter-online serve` listens; unset: rollspec starts it itself.",
    )
    token_file: Path | None = Field(
        None,
        description="File with the daemon's token; unset: DRAFTER_ONLINE_TOKEN, or none.",
    )
    device: str = Field(
        "cpu", description="Of `dedicated`, `policy`: torch device of the trainer that rollspec starts."
    )
    ray: RayConfig = RayConfig()
    draft_vocab: int | None = Field(
        None,
        ge=1,
        description="Tokens that a fresh head drafts, chosen by what the policy says; unset: 8192 where it has "
        "at least twice as many, else all.",
    )
    publish_every: int = Field(
        100, ge=1, description="Optimiser steps from which on new weights are published, once that pays."
    )
    train_when: Literal["always", "pays"] = Field(
        "always",
        description="`pays` trains a round of `publish_every` steps only where its expected gain exceeds its cost, as "
        "SpecBlock does (docs/drafter.md).",
    )
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
        """Whether there is a trainer, which is the job's."""
        return self.mode in ("idle", "dedicated", "policy")


class GuardConfig(Section):
    """The collapse alarm: a drafter whose acceptance is below break-even is switched off until it would pay."""

    enabled: bool = Field(True, description="False lets a drafter draft however few of its tokens are accepted.")


class StrategyConfig(Section):
    """Of single strategies; the parameters of the published bandits are those of their papers (docs/tuning.md)."""

    table: dict[int, int] | None = Field(
        None,
        min_length=1,
        description="Of `table`: draft length by the batch size up to which it holds, such as {4: 8, 64: 0}.",
    )
    sets: dict[int, tuple[int, ...]] | None = Field(
        None,
        min_length=1,
        description="Of `beg_mab`: draft lengths to choose among by the batch size up to which they hold, such as "
        "{4: [4, 8], 32: [1, 2], 64: [0]}; unset: all of `arms` at every size.",
    )


class TuningConfig(Section):
    """How much is drafted: the strategy that chooses an arm (drafters, K) per step and batch bucket."""

    strategy: Literal[
        "hedge", "static", "table", "random", "ucbspec", "exp3spec", "beg_mab", "thompson", "smartspec", "respec"
    ] = Field(
        "hedge",
        description="`hedge`: discounted full-information Hedge over measured goodput. `static`: longest of `arms`. "
        "`table`: `options.table`. `random`: any arm at any step. The others are published (docs/tuning.md).",
    )
    arms: tuple[int, ...] | None = Field(
        None,
        min_length=1,
        description="Draft lengths K to choose from, 0 for none; unset: 0, 1, 2, 4, ... up to proposal.k_max.",
    )
    options: StrategyConfig = StrategyConfig()
    guard: GuardConfig = GuardConfig()

    def lengths(self, k_max: int) -> tuple[int, ...]:
        """The draft lengths to choose from, ascending: `arms`, or 0, the powers of two and `k_max`."""
        ks = self.arms if self.arms is not None else (0, *(1 << i for i in range(k_max.bit_length())), k_max)
        return tuple(sorted(set(ks)))


class HistoryConfig(Section):
    """Past rollouts: kept in memory for drafting, on disk across engine restarts."""

    dir: Path | None = Field(None, description="Folder for saved history; unset keeps history in memory only.")
    max_bytes: int = Field(
        256 << 20,
        ge=1 << 16,
        description="Bytes of past responses kept (the prompt that was used longest ago goes first). What suffix "
        "drafts are looked up in may take four times as many.",
    )


class CoupledConfig(Section):
    """Noise of `mode: coupled`."""

    seed: int = Field(
        0,
        ge=0,
        description="The run's seed: with the same one, the same engine seeds and policies, tokens are the same. "
        "Engines that sample siblings of one prompt must differ in vLLM's own seed, as trainers make them.",
    )
    drafts: Literal["noise", "greedy"] = Field(
        "noise",
        description="What the draft head proposes: `noise`: argmax(its logits / T + the noise of the next token), "
        "which agrees with the target as far as their distributions do; `greedy`: its likeliest token, accepted with "
        "at most max p. Either way the text is the same.",
    )


class ReuseConfig(Section):
    """What past rollouts may do besides being drafted from."""

    mode: Literal["independent", "replay", "lenient"] = Field(
        "independent",
        description="`independent`: each epoch's randomness is fresh. `replay`: a sample keeps its noise over epochs "
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
        return "keep" if self.mode == "replay" else "fresh"


class HealthConfig(Section):
    """Thresholds of health warnings about training rollouts: one warning each, and no other effect."""

    max_overlap: float = Field(
        0.2,
        ge=0,
        le=1,
        description="Largest share of tokens, beyond chance, in prefixes that repeat the last epoch's response.",
    )


class TelemetryConfig(Section):
    """Where measurements go besides the trainer's own logger, and when they are worth a warning."""

    jsonl: Path | None = Field(None, description="Append one JSON object per drained interval to this file.")
    health: HealthConfig = HealthConfig()
