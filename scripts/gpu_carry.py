#!/usr/bin/env python3
"""Carries vLLM to a GPU machine without a network, in parts of a bounded size. Standard library only.

    python scripts/gpu_carry.py WHEEL OUTDIR --wheels DIR      # here: strip, pack, split; OUTDIR/manifest.json
    python scripts/gpu_carry.py WHEEL OUTDIR --wheels DIR --rehearse --machine PACKAGES.txt   # and try the imports here
    python scripts/gpu_carry.py --join OUTDIR SITE             # there: check, join, unpack; PYTHONPATH=SITE

What is stripped: compiled objects that a dense bf16 model on a Hopper GPU does not load (FlashAttention 2, MoE,
DeepGEMM ...), headers, the Rust front end. What is kept: `_C_stable_libtorch`, FlashAttention 3, small objects, and
what Python reads. `--wheels`: wheels of what the machine lacks; they are unpacked beside vLLM.

    OUTDIR/part-000 part-001 ...   a tar.xz cut into pieces; carried in any order, in as many calls as there are parts
    OUTDIR/manifest.json           names, bytes and SHA-256 of the parts and of the whole, what was left out
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import io
import json
import lzma
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FORMAT = "rollspec-carry-1"
MB = 1_000_000
PART_MB = 60
PRESET = 2
"""Of xz: compiled GPU code is compressed already, so more effort gains little."""
OBJECTS = ("vllm/_C_stable_libtorch*.so", "vllm/vllm_flash_attn/_vllm_fa3_C*.so")
"""Large compiled objects that stay."""
SMALL = MB
"""Bytes up to which any other compiled object is kept."""
TEXT = (".py", ".json", ".jinja", ".txt", ".typed", ".yaml", ".yml", ".pyi", "/METADATA", "/WHEEL")
IMPORTS = (
    "vllm",
    "vllm.engine.arg_utils",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.models.llama_eagle3",
)
"""What a rehearsal imports: all that an engine of the suite loads in Python."""


class CarryError(Exception):
    """What is wrong, in one sentence that names the file and the remedy."""


def kept(name: str, size: int, objects: tuple[str, ...] = OBJECTS) -> bool:
    """Whether a file of a CUDA wheel of vLLM is carried."""
    if name.endswith(".so") or ".so." in name:
        return size <= SMALL or any(fnmatch.fnmatch(name, pattern) for pattern in objects)
    return name.endswith(TEXT)


def sha256(path: Path) -> str:
    """Of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# ---- here -----------------------------------------------------------------------------------------------------------


class Parts(io.RawIOBase):
    """A stream that is written to files of at most `size` bytes."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size
        self.paths: list[Path] = []
        self.whole = hashlib.sha256()
        self._room = 0
        self._file: Any = None

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, data: Any) -> int:
        """Cut where a part is full."""
        view = memoryview(data)
        self.whole.update(view)
        at = 0
        while at < len(view):
            if not self._room:
                self.finish()
                self.paths.append(self.folder / f"part-{len(self.paths):03d}")
                self._file, self._room = self.paths[-1].open("wb"), self.size
            n = min(self._room, len(view) - at)
            self._file.write(view[at : at + n])
            at, self._room = at + n, self._room - n
        return len(view)

    def finish(self) -> None:
        """Close the part that is being written."""
        if self._file is not None:
            self._file.close()


def split(wheel: Path, out: Path, wheels: Path | None = None, part_bytes: int = PART_MB * MB) -> dict[str, Any]:
    """Write parts and manifest to `out`; returns the manifest.

    Raises:
        CarryError: the wheel cannot be read, or `out` holds parts of something else.
    """
    out.mkdir(parents=True, exist_ok=True)
    if any(out.glob("part-*")) and not (out / "manifest.json").is_file():
        raise CarryError(f"{out} holds parts without a manifest; empty it or choose another folder.")
    for old in out.glob("part-*"):
        old.unlink()
    left: dict[str, int] = {}
    parts = Parts(out, part_bytes)
    extra = sorted(wheels.glob("*.whl")) if wheels else []
    try:
        # "w|": written as it comes, so the whole is never in memory.
        with (
            zipfile.ZipFile(wheel) as source,
            lzma.LZMAFile(parts, "wb", preset=PRESET) as packed,
            tarfile.open(fileobj=packed, mode="w|") as tar,
        ):
            for info in source.infolist():
                if info.is_dir():
                    continue
                if not kept(info.filename, info.file_size):
                    left[info.filename] = info.file_size
                    continue
                entry = tarfile.TarInfo(f"site/{info.filename}")
                entry.size, entry.mode = info.file_size, 0o644
                with source.open(info) as file:
                    tar.addfile(entry, file)
            for path in extra:
                tar.add(path, f"wheels/{path.name}")
    except (OSError, zipfile.BadZipFile) as e:
        raise CarryError(f"{wheel} cannot be packed ({e}); give a wheel that is whole, and room in {out}.") from e
    finally:
        parts.finish()
    manifest = {
        "format": FORMAT,
        "wheel": wheel.name,
        "wheel_sha256": sha256(wheel),
        "wheels": [p.name for p in extra],
        "bytes": sum(p.stat().st_size for p in parts.paths),
        "sha256": parts.whole.hexdigest(),
        "parts": [{"name": p.name, "bytes": p.stat().st_size, "sha256": sha256(p)} for p in parts.paths],
        "left_out": dict(sorted(left.items(), key=lambda item: -item[1])[:20]),
        "left_out_files": len(left),
        "left_out_bytes": sum(left.values()),
    }
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


# ---- there ----------------------------------------------------------------------------------------------------------


class Joined(io.RawIOBase):
    """The parts as one stream, read once."""

    def __init__(self, paths: list[Path]) -> None:
        self._blocks = self._read(paths)
        self._left = b""

    @staticmethod
    def _read(paths: list[Path]) -> Iterator[bytes]:
        for path in paths:
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    yield block

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """As `RawIOBase`."""
        while not self._left:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._left = block
        n = min(len(buffer), len(self._left))
        buffer[:n], self._left = self._left[:n], self._left[n:]
        return n


def check(folder: Path) -> tuple[dict[str, Any], list[Path]]:
    """The manifest and the parts of a folder, all there and undamaged.

    Raises:
        CarryError: naming the part that is missing or differs.
    """
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError) as e:
        raise CarryError(f"{folder}/manifest.json cannot be read ({e}); carry it, too.") from e
    if manifest.get("format") != FORMAT:
        raise CarryError(f"{folder}/manifest.json has format {manifest.get('format')!r}; pack again with this script.")
    paths = [folder / p["name"] for p in manifest["parts"]]
    missing = [p.name for p in paths if not p.is_file()]
    if missing:
        raise CarryError(f"{folder} lacks {', '.join(missing)} of {len(paths)} parts; carry them, too.")
    whole = hashlib.sha256()
    for path, part in zip(paths, manifest["parts"], strict=True):
        data = path.read_bytes()
        if len(data) != part["bytes"] or hashlib.sha256(data).hexdigest() != part["sha256"]:
            raise CarryError(f"{path} differs from the manifest's checksum; carry it again.")
        whole.update(data)
    if whole.hexdigest() != manifest["sha256"]:
        raise CarryError(f"{folder}: the parts together differ from the manifest's checksum; pack again.")
    return manifest, paths


def join(folder: Path, into: Path) -> dict[str, Any]:
    """Check the parts, unpack them, and unpack the wheels among them; returns the manifest.

    Raises:
        CarryError: a part is missing or damaged, or `into` is not empty.
    """
    manifest, paths = check(folder)
    if into.exists() and any(into.iterdir()):
        raise CarryError(f"{into} is not empty; give a new folder.")
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into.parent) as scratch:
        with tarfile.open(fileobj=io.BufferedReader(Joined(paths), 1 << 20), mode="r|xz") as tar:
            tar.extractall(scratch, filter="data")
        for item in (Path(scratch) / "site").iterdir():
            item.rename(into / item.name)
        for wheel in sorted((Path(scratch) / "wheels").glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(into)
    return manifest


# ---- the rehearsal --------------------------------------------------------------------------------------------------

_TRY = """
import importlib, importlib.abc, importlib.metadata, json, sys
from importlib.machinery import PathFinder
site, allowed, modules = json.loads(sys.argv[1])
owners = importlib.metadata.packages_distributions()
named = None if allowed is None else {n.lower().replace("_", "-") for n in allowed}
refused = []
class Gate(importlib.abc.MetaPathFinder):
    # In the place of the finder of installed packages: finds what the machine has, and what is carried.
    find_distributions = staticmethod(PathFinder.find_distributions)
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        found = PathFinder.find_spec(name, path, target)
        if found is None or path is not None or named is None or top in sys.stdlib_module_names or top.startswith("_"):
            return found
        if top not in owners or PathFinder.find_spec(name, [site]) is not None:
            return found  # part of a package that brings it along, or carried
        if any(o.lower().replace("_", "-") in named for o in owners.get(top, ())):
            return found
        if top not in refused:
            refused.append(top)
        return None
sys.meta_path[:] = [Gate() if finder is PathFinder else finder for finder in sys.meta_path]
out = {}
for name in modules:
    try:
        importlib.import_module(name)
        out[name] = None
    except BaseException as e:
        out[name] = f"{type(e).__name__}: {e}"
import vllm
print("RESULT" + json.dumps({"imports": out, "refused": refused, "vllm": vllm.__file__}))
"""


def rehearse(folder: Path, machine: Path | None = None, imports: tuple[str, ...] = IMPORTS) -> dict[str, Any]:
    """Join in a scratch folder and import what an engine needs, on this machine's CPU.

    Args:
        folder: of the parts.
        machine: file of the packages that the GPU machine has, one a line; None: it has what this one has. Compiled
            packages that are carried for another Python than this one are named there, too, and added afterwards.
        imports: modules to import, in this order.

    Returns:
        `imports`: module -> error or None; `refused`: top-level modules that were asked for and that the machine lacks,
        of which some are optional.
    """
    allowed = machine.read_text().split() if machine else None
    with tempfile.TemporaryDirectory() as scratch:
        site = Path(scratch) / "site"
        join(folder, site)
        environment = os.environ | {"PYTHONPATH": str(site), "VLLM_LOGGING_LEVEL": "ERROR", "CUDA_VISIBLE_DEVICES": ""}
        arguments = json.dumps([str(site), allowed, imports])
        done = subprocess.run(
            [sys.executable, "-c", _TRY, arguments], env=environment, capture_output=True, text=True, check=False,
            cwd=scratch,
        )  # fmt: skip
    line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT")), None)
    if line is None:
        raise CarryError(f"the rehearsal ended without a result: {done.stderr.strip().splitlines()[-1:]}")
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT"))
    return found


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the CUDA wheel; with --join the folder of the parts")
    parser.add_argument("target", type=Path, help="folder for the parts; with --join the folder to unpack to")
    parser.add_argument("--wheels", type=Path, help="folder of wheels that the machine lacks")
    parser.add_argument("--part-mb", type=float, default=PART_MB, help="most megabytes of a part")
    parser.add_argument("--join", action="store_true", help="check the parts, join and unpack them")
    parser.add_argument("--rehearse", action="store_true", help="join in a scratch folder and try the imports on CPU")
    parser.add_argument("--machine", type=Path, help="with --rehearse: the machine's packages, one a line")
    args = parser.parse_args(argv)
    try:
        if args.join:
            found = join(args.source, args.target)
            print(f"{args.target}: {found['wheel']} and {len(found['wheels'])} more wheels; PYTHONPATH={args.target}")
            return 0
        found = split(args.source, args.target, args.wheels, int(args.part_mb * MB))
        print(
            f"{args.target}: {len(found['parts'])} parts, {found['bytes'] / MB:.1f} MB; left out "
            f"{found['left_out_files']} files, {found['left_out_bytes'] / MB:.0f} MB"
        )
        if not args.rehearse:
            return 0
        result = rehearse(args.target, args.machine)
        for name, error in result["imports"].items():
            print(f"{'ok  ' if error is None else 'FAIL'} {name}{'' if error is None else f': {error}'}")
        if result["refused"]:
            print(f"asked for and not on the machine (some are optional): {', '.join(result['refused'])}")
        return int(any(result["imports"].values()))
    except CarryError as e:
        print(f"gpu_carry: {e}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
