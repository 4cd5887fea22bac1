"""What a daemon starts with: its folder, the head that is given or a fresh one, or the trainer and samples it saved."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from drafter_online import head as heads
from drafter_online import model, vocabulary
from drafter_online.alarms import Alarms
from drafter_online.architecture import target_config
from drafter_online.buffer import Buffer
from drafter_online.errors import BufferFileError, HeadError, ServiceError
from drafter_online.files import oserror_as, try_lock
from drafter_online.settings import ServiceConfig
from drafter_online.trainer import Trainer
from drafter_online.versions import Versions


def lock_folder(folder: Path) -> int:
    """Take a folder for this process, however that ends; closing the returned file descriptor frees it.

    Raises:
        ServiceError: it cannot be written, or another daemon has it.
    """
    path = folder / "lock"
    with oserror_as(ServiceError, f"{folder} cannot be written", "give another --dir"):
        fd = try_lock(path)
    if fd is None:
        raise ServiceError(
            f"{folder} is in use by another daemon (process {path.read_text() or 'unknown'}); stop it, "
            "or give another --dir."
        )
    os.ftruncate(fd, 0)
    os.write(fd, str(os.getpid()).encode())
    return fd


def first_drafter(config: ServiceConfig) -> model.TrainedDrafter:
    """The head or draft model to start from, in float32.

    Raises:
        HeadError: it cannot be read, or does not fit the target.
    """
    if config.head is not None:
        return model.load(config.head, config.target)
    size = config.draft_vocab or vocabulary.drafted(int(target_config(config.target).vocab_size))
    return model.Eagle3(heads.fresh(config.target, draft_vocab_size=size))


def dtype(config: ServiceConfig) -> Any:
    """The torch dtype of published weights: the one that is set, else the target's."""
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    name = getattr(target_config(config.target), "dtype", None) or "bfloat16"
    return getattr(torch, str(name).removeprefix("torch."))


def trainer(config: ServiceConfig, versions: Versions, alarms: Alarms) -> Trainer:
    """The trainer, where an earlier daemon of this folder left off; of the first head where there was none.

    Raises:
        DrafterError: the head, its newest version or its checkpoint cannot be used.
    """
    parent = versions.candidate()
    if parent is not None:
        versions.load(parent)  # verified before it is built upon
        config = config.model_copy(update={"head": versions.path(parent)})
    made = first_drafter(config)
    found = Trainer(
        made, buffer(config, alarms), config.training,
        checkpoints=config.dir / "state", device=config.device, parent=parent,
    )  # fmt: skip
    found.resume()
    return found


def publish_first(config: ServiceConfig, versions: Versions) -> int:
    """Publish the head that engines were started with."""
    made, of = first_drafter(config), dtype(config)
    return versions.publish(
        made.weights(of), made.config(of), base=made.base, kind=made.kind,
        target_version=0, provenance={"copy_of": str(config.head or "a fresh head")},
    )  # fmt: skip


def torch_device(name: str) -> str:
    """What torch calls here the device that an engine calls `name`: a GPU by its UUID, any other as torch does."""
    if not name.startswith("GPU-"):
        return name
    seen = [f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in range(torch.cuda.device_count())]
    if name not in seen:
        raise ServiceError(
            f"the engine's device {name} is none of those that the trainer sees "
            f"({', '.join(seen) or 'none'}); give the trainer all devices in CUDA_VISIBLE_DEVICES."
        )
    return f"cuda:{seen.index(name)}"


def buffer(config: ServiceConfig, alarms: Alarms) -> Buffer:
    """The samples that were saved; empty, with an alarm, where they are damaged."""
    keep = config.buffer
    if "max_bytes" not in keep.model_fields_set:
        keep = keep.model_copy(update={"max_bytes": config.buffer_bytes})
    try:
        return Buffer.load(config.dir / "buffer", keep) if config.keep_samples else Buffer(keep)
    except BufferFileError as e:
        alarms.set("buffer", e.plain)
        return Buffer(keep)


def fit_vocabulary(config: ServiceConfig, training: Trainer, alarms: Alarms) -> None:
    """Have the head draft the tokens of the samples; where it cannot, it keeps those it has, and raises an alarm."""
    if not isinstance(training.drafter, model.Eagle3):
        return  # a draft model drafts all tokens
    try:
        heads.fit_vocabulary(training.drafter.head, config.target, training.buffer.token_counts())
        alarms.set("vocabulary", None)
    except HeadError as e:
        alarms.set("vocabulary", e.plain)
