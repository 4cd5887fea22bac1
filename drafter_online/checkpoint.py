"""Checkpoints of training, `step-00000120-CHECKSUM.safetensors`: whole or not there, written beside the training.

One holds fp32 master weights and optimiser moments, and in its metadata counters and random state. The
newest that is as its checksum says is taken; one that is not is passed over with a warning.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from drafter_online.errors import TrainingError
from drafter_online.files import replace, sha256, sync_folder

log = logging.getLogger(__name__)
FORMAT = "drafter-online-training-2"
KEEP = 2  # newest ones kept


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A checkpoint's tensors and record.

    Raises:
        OSError, ValueError, KeyError, SafetensorError: it cannot be read, or is not as it was written.
    """
    blob = path.read_bytes()
    if not path.stem.endswith(f"-{sha256(blob)}"):
        raise ValueError("it is truncated or altered")
    # The header is 8 bytes of length and that many bytes of JSON (safetensors' format definition).
    metadata = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])["__metadata__"]
    if metadata["format"] != FORMAT:
        raise ValueError("it is of another format")
    return load(blob), json.loads(metadata["record"])


class Checkpoints:
    """A folder of checkpoints, made when first written to, at most one of which is being written."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.failed: str | None = None  # why the last write failed, None when it did not
        self._writer: threading.Thread | None = None

    def save(self, step: int, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
        """Write tensors that are not changed any more, in the background; a write still under way is waited for first.

        A write that fails is logged, and `failed` says why: training continues with the older checkpoint.
        """
        self.wait()
        self._writer = threading.Thread(
            target=self._write, args=(step, tensors, record), name="drafter-checkpoint", daemon=False
        )
        self._writer.start()

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The newest whole checkpoint; None when there is none at all.

        Raises:
            TrainingError: there are checkpoints, and every one is damaged.
        """
        self.wait()
        reason = ""
        for path in reversed(self._paths()):
            try:
                return read(path)
            except (OSError, ValueError, KeyError, SafetensorError) as e:
                reason = f"{path.name}: {e}"
                log.warning("drafter-online: the checkpoint in %s is passed over (%s)", self.folder, reason)
        if reason:
            raise TrainingError(f"no checkpoint in {self.folder} can be read ({reason}); delete it to start anew.")
        return None

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("step-*.safetensors"))

    def _write(self, step: int, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
        blob = save(
            {n: t.contiguous() for n, t in tensors.items()}, metadata={"format": FORMAT, "record": json.dumps(record)}
        )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            replace(self.folder / f"step-{step:08d}-{sha256(blob)}.safetensors", blob)
            sync_folder(self.folder)
            self.failed = None
            for old in [*self._paths()[:-KEEP], *self.folder.glob(".step-*")]:  # the latter a killed process left
                old.unlink(missing_ok=True)
        except OSError as e:
            self.failed = f"the checkpoint of step {step} cannot be written to {self.folder} ({e.strerror or e})"
            log.warning("drafter-online: %s; training continues", self.failed)
