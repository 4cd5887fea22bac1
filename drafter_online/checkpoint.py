"""Checkpoints of training, `folder/step-00000120/{state.safetensors, state.json}`: whole or not there, written beside
the training, verified when read. The newest that is whole is taken; one that is not is passed over with a warning.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from drafter_online.errors import TrainingError
from drafter_online.files import digest, sha256, sync_folder, temporary_folder, write_synced

log = logging.getLogger(__name__)
FORMAT = "drafter-online-training-1"
STATE, RECORD = "state.safetensors", "state.json"
KEEP = 2  # newest ones kept


class Checkpoints:
    """A folder of checkpoints, made when first written to, at most one of which is being written."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.failed: str | None = None  # why the last write failed, None when it did not
        self._writer: threading.Thread | None = None

    def save(self, step: int, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
        """Write in the background. The tensors are copied now; a write still under way is waited for first.

        A write that fails is logged, and `failed` says why: training continues with the older checkpoint.
        """
        self.wait()
        frozen = {n: t.detach().to("cpu", copy=True).contiguous() for n, t in tensors.items()}
        self._writer = threading.Thread(
            target=self._write, args=(step, frozen, dict(record)), name="drafter-checkpoint", daemon=False
        )
        self._writer.start()

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def steps(self) -> list[int]:
        """Steps of the checkpoints there are, oldest first."""
        return sorted(int(p.name[5:]) for p in self.folder.glob("step-????????") if p.name[5:].isdigit())

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The newest whole checkpoint; None when there is none at all.

        Raises:
            TrainingError: there are checkpoints, and every one is damaged.
        """
        self.wait()
        steps = self.steps()
        reason = ""
        for step in reversed(steps):
            try:
                return self._read(step)
            except (OSError, ValueError, KeyError) as e:
                reason = f"step {step}: {e}"
                log.warning("drafter-online: the checkpoint in %s is passed over (%s)", self.folder, reason)
        if steps:
            raise TrainingError(
                f"drafter-online: no checkpoint in {self.folder} can be read ({reason}); delete it to start anew."
            )
        return None

    def _read(self, step: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        folder = self._path(step)
        record = json.loads((folder / RECORD).read_bytes())
        if record.pop("checksum") != digest(record) or record["format"] != FORMAT:
            raise ValueError(f"{RECORD} was altered or is of another format")
        blob = (folder / STATE).read_bytes()
        if sha256(blob) != record["state"]:
            raise ValueError(f"{STATE} is truncated or altered")
        try:
            return load(blob), record["record"]
        except SafetensorError as e:
            raise ValueError(str(e)) from e

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _write(self, step: int, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        blob = save(tensors)
        entry = {"format": FORMAT, "state": sha256(blob), "record": record}
        try:
            with temporary_folder(self.folder, ".writing") as temporary:
                write_synced(temporary / STATE, blob)
                write_synced(temporary / RECORD, json.dumps({**entry, "checksum": digest(entry)}).encode())
                sync_folder(temporary)
                shutil.rmtree(self._path(step), ignore_errors=True)
                os.rename(temporary, self._path(step))
            sync_folder(self.folder)
            self.failed = None
        except OSError as e:
            self.failed = f"the checkpoint of step {step} cannot be written to {self.folder} ({e.strerror or e})"
            log.warning("drafter-online: %s; training continues", self.failed)
            return
        for old in self.steps()[:-KEEP]:
            shutil.rmtree(self._path(old), ignore_errors=True)
        for left in self.folder.glob(".writing-*"):
            shutil.rmtree(left, ignore_errors=True)
