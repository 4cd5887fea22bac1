"""Whether a trainer is of a version that its hooks were run against; with any other a job runs without rollspec."""

from __future__ import annotations

import logging
from importlib import metadata

from packaging.specifiers import SpecifierSet

logger = logging.getLogger("rollspec")


def is_tested(trainer: str, tested: str, version: str | None = None) -> bool:
    """Whether a trainer's version is in the range `tested`; where it is not, one sentence says so.

    Args:
        trainer: its name; in lower case that of its distribution.
        version: the one that runs; by default the installed one.
    """
    try:
        version = version or metadata.version(trainer.lower())
    except metadata.PackageNotFoundError:
        problem = f"{trainer} is not installed (the tested range is {tested})"
    else:
        if SpecifierSet(tested).contains(version, prereleases=True):
            return True
        problem = f"{trainer} {version} is outside the tested range {tested}"
    logger.warning("rollspec: %s, so this job runs without rollspec; use one in it.", problem)
    return False
