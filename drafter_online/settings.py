"""Every knob of the daemon, once: typed, described, validated."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from drafter_online.buffer import BufferConfig
from drafter_online.errors import DrafterError, ServiceError, TrainingError
from drafter_online.trainer import DrafterTraining

M = TypeVar("M", bound=BaseModel)


class ServiceConfig(BaseModel):
    """Every knob of the daemon."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    dir: Path = Field(description="Folder of versions, checkpoints and samples; one daemon each.")
    target: str = Field(description="Folder (or hub name) of the target's checkpoint.")
    head: Path | None = Field(None, description="EAGLE-3 head or draft model to start from; unset: a fresh head.")
    draft_vocab: int | None = Field(
        None,
        ge=1,
        description="Tokens that a fresh head drafts, chosen by what the target says; unset: 8192 where it has "
        "at least twice as many, else all.",
    )
    endpoint: str = Field("tcp://127.0.0.1:5765", description="Where engines connect: tcp://HOST:PORT or ipc://PATH.")
    token_file: Path | None = Field(None, description="File with the token; unset: DRAFTER_ONLINE_TOKEN, or none.")
    device: str = Field("cpu", description="Torch device that trains.")
    dtype: str = Field("auto", description="Of published weights; `auto`: the target's.")
    publish_every: int = Field(100, ge=1, description="Optimiser steps from which on it publishes, once that pays.")
    passes: float = Field(
        16.0, gt=0, description="Times a token is trained on, on average, before training waits for new feedback."
    )
    train_when: Literal["always", "pays"] = Field(
        "always",
        description="`pays` trains a round of publish_every steps only where its expected gain exceeds its cost.",
    )
    yields_to: Path | None = Field(
        None,
        description="Folder in which engines say when they compute (drafter_online/activity.py). The trainer takes the "
        "device of the first one, and its time in between. Unset: the device is the trainer's own.",
    )
    buffer_bytes: int = Field(1 << 30, ge=1 << 16, description="Bytes of samples that are trained on.")
    buffer: BufferConfig = Field(
        BufferConfig(),
        description="Which of them are kept (docs/drafter.md): half_life, tail_quota, keep_versions, ...",
    )
    inbox_bytes: int = Field(256 << 20, ge=1 << 16, description="Bytes of samples that may wait for the training.")
    recency: float = Field(
        60.0,
        ge=0,
        description="Seconds that make a generation of samples, whose weight halves every four generations; 0: by the "
        "engines' policy versions, for RL.",
    )
    retention_hours: float = Field(24.0, gt=0, description="Older samples are deleted (where recency is not 0).")
    keep_samples: bool = Field(True, description="Write samples to disk, so that a restart resumes with them.")
    keep_versions: int = Field(8, ge=1, description="Newest versions kept; promoted and canary besides.")
    save_seconds: float = Field(60.0, gt=0, description="Seconds between two saves of the samples.")
    patience: float = Field(60.0, gt=0, description="Seconds until a canary without a verdict is given to one more.")
    linger: float | None = Field(
        None, gt=0, description="End after this long without an engine (ten times that for the first); unset: never."
    )
    job: bool = Field(
        False,
        description="Of one job: engines may have the state copied into its checkpoints, and taken from them.",
    )
    training: DrafterTraining = Field(DrafterTraining(), description="Settings of the training (docs/drafter.md).")


def training_of(given: dict[str, Any]) -> DrafterTraining:
    """Settings of the training.

    Raises:
        TrainingError: naming the first that is not one, or has a value it cannot have.
    """
    return _checked(DrafterTraining, given, "training.", TrainingError)


def settings(given: dict[str, Any]) -> ServiceConfig:
    """The daemon's configuration.

    Raises:
        ServiceError: naming the first knob that does not exist, or has a value it cannot have.
    """
    return _checked(ServiceConfig, given, "", ServiceError)


def _checked(kind: type[M], given: dict[str, Any], prefix: str, error: type[DrafterError]) -> M:
    try:
        return kind(**given)
    except ValidationError as e:
        first = e.errors()[0]
        where = prefix + ".".join(map(str, first["loc"]))
        raise error(f"{where} = {first['input']!r}: {first['msg']}.") from e
