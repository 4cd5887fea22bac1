"""Training text for a head: an engine in a process of its own generates, and its samples come into a buffer.

The engine's program is rollspec's, known by name only. What it has written is on disk: a run that was killed loses
nothing, `collect` takes it up.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from drafter_online import child
from drafter_online.buffer import Buffer
from drafter_online.errors import SampleError, TrainingError
from drafter_online.files import replace
from drafter_online.samples import Sample

ENGINE = "rollspec.engine.vllm.generate"
JOB, PROGRESS, SAMPLES, LOG = "job.json", "progress.json", "samples", "engine.log"
START_SECONDS = 1800.0  # an engine on a GPU may compile for minutes
LATE_SECONDS = 300.0  # after its time is over: requests end, and the last samples are written


@dataclasses.dataclass(frozen=True)
class GenerationJob:
    """What the engine generates, until a limit of `seconds`, response `tokens` or `bytes` of samples is reached."""

    model: str
    head: str  # folder; it says which layers are recorded
    prompts: list[list[int]]
    temperature: float
    max_tokens: int
    max_model_len: int
    seed: int
    batch: int
    seconds: float
    tokens: int | None = None
    bytes: int | None = None
    drafts: int = 0  # tokens that the head drafts per step; what is rejected of them is recorded, too
    engine: dict[str, Any] = dataclasses.field(default_factory=dict)  # more arguments of vLLM's `LLM`


def run(job: GenerationJob, folder: Path, note: Callable[[dict[str, Any]], None]) -> None:
    """Generate into `folder`, which `collect` empties; `note` gets the engine's progress a few times a second.

    Raises:
        TrainingError: vLLM is not installed, or the engine failed.
    """
    if find_spec("vllm") is None:
        raise TrainingError("make-head generates with vLLM, which is not installed; pip install vllm.")
    folder.mkdir(parents=True, exist_ok=True)
    replace(folder / JOB, json.dumps(dataclasses.asdict(job)).encode())

    def written() -> bool:
        progress = progress_of(folder)
        note(progress)
        return progress.get("state") == "done"

    seconds = START_SECONDS + job.seconds + LATE_SECONDS
    code = child.run(ENGINE, folder / JOB, folder / LOG, seconds, written)
    if code != 0:
        what = "did not end in time" if code is None else f"ended with status {code}"
        known = child.first_error((folder / LOG).read_text(errors="replace")) or progress_of(folder).get("error")
        cause = str(known or "it was killed, or there was no memory").rstrip(".")
        raise TrainingError(f"the engine that generates {what} ({cause}); see {folder / LOG}.")


def progress_of(folder: Path) -> dict[str, Any]:
    """The engine's latest progress; empty before the first."""
    try:
        return dict(json.loads((folder / PROGRESS).read_bytes()))
    except (OSError, ValueError):
        return {}


def collect(folder: Path, buffer: Buffer, into: Path) -> dict[str, Any]:
    """Take what an engine wrote to `folder` into a buffer, save that to `into`, and remove the folder's samples.

    Returns:
        the engine's last progress; `refused` counts samples that are damaged. Empty where there was nothing.
    """
    progress = progress_of(folder)
    refused = 0
    files = sorted((folder / SAMPLES).glob("*.safetensors"))
    for file in files:
        try:
            buffer.add(Sample.from_bytes(file.read_bytes()))
        except SampleError:
            refused += 1
    if files:
        buffer.save(into)
    (folder / PROGRESS).unlink(missing_ok=True)
    shutil.rmtree(folder / SAMPLES, ignore_errors=True)
    return {**progress, "refused": refused} if progress or files else {}
