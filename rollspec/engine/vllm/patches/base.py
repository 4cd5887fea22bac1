"""Patches of foreign code: one class each, with the versions it applies to, its upstream reference and its end.

A patch is applied only where all three hold: it was asked for, the installed version is in its range, and its own check
finds the fault. So a patch outlives its bug by nothing.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import ClassVar

logger = logging.getLogger("rollspec.patches")


class Patch(ABC):
    """One change to foreign code.

    Class attributes: `name`; `versions`, a PEP 440 specifier of vLLM versions it was written for; `upstream`, the
    line or issue it works around; `removal`, the condition under which this class is deleted; `correctness`, whether
    speculation must stay off without it (False: it only costs time).
    """

    name: ClassVar[str]
    versions: ClassVar[str]
    upstream: ClassVar[str]
    removal: ClassVar[str]
    correctness: ClassVar[bool] = True

    @abstractmethod
    def needed(self) -> bool:
        """Whether the fault is present here. May import the foreign module; must not change anything."""

    @abstractmethod
    def apply(self) -> None:
        """Make the change. Idempotent: plugins may be loaded more than once in a process."""

    def install(self, version: str) -> bool:
        """Apply where version and need say so; returns whether it was applied."""
        from packaging.specifiers import SpecifierSet

        if not SpecifierSet(self.versions).contains(version, prereleases=True):
            logger.info("rollspec: patch %s is for vLLM %s, not %s: left out", self.name, self.versions, version)
            return False
        if not self.needed():
            return False
        self.apply()
        logger.debug("rollspec: patch %s applied (%s)", self.name, self.upstream)
        return True


class _OnImport(importlib.abc.MetaPathFinder):
    """Runs a callback right after one module is first imported, then removes itself."""

    def __init__(self, name: str, callback: Callable[[ModuleType], None]) -> None:
        self.name = name
        self.callback = callback

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.callback(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def on_import(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Call `callback(module)` now if `name` is imported, else right after its first import.

    Importing some vLLM modules early drags in CUDA or costs start-up time, hence waiting for the engine to do it.
    """
    module = sys.modules.get(name)
    if module is not None:
        callback(module)
    else:
        sys.meta_path.insert(0, _OnImport(name, callback))
