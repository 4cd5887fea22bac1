"""A hook: one target of vLLM that rollspec wraps, replaces or adds to, with versions, reason and removal condition.

A hook owns the assignment and nothing else; what runs in its place belongs to the module that gives it. Two kinds:

    SomeHook.install(version, around)    # a function of vLLM's modules or classes, in every process that imports it;
                                         # `around(original, *args, **kwargs)` runs in the original's place
    SomeRunnerHook.put(owner, value, __name__)    # an attribute of one running object; returns what was there
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from rollspec.engine.vllm.compat import TESTED
from rollspec.tested import in_range

logger = logging.getLogger("rollspec.hooks")

Around = Callable[..., Any]

MARK = "_rollspec"
"""On what rollspec put in the place of a function; our notes on vLLM's objects begin with it too."""

ANY = ">=0"
"""Of hooks that every version gets: those that say why an engine is left alone."""


@dataclass(frozen=True)
class Hook:
    """One change to vLLM, made where vLLM's module is, or will be, imported."""

    name: str
    target: str  # what the hook is about, "module:Class.function"
    why: str
    removal: str  # the condition under which the hook is deleted
    versions: str = TESTED  # a PEP 440 specifier of the vLLM versions that it was run with
    by: tuple[str, ...] = ()  # the modules of rollspec that give what runs instead, innermost first
    correctness: bool = False  # outputs would be wrong without it in an engine that uses it
    cpu_only: bool = False  # it is for vLLM's CPU build alone
    adds: bool = False  # vLLM has nothing of that name: what is given is added
    more: tuple[str, ...] = ()  # further targets

    @property
    def targets(self) -> tuple[str, ...]:
        """All that must be as it was in the versions."""
        return (self.target, *self.more)

    def off_because(self, version: str, cpu: bool = True) -> str | None:
        """Why this hook is left out with vLLM `version` (`cpu`: built for CPU), as a part of a sentence; else None."""
        if self.cpu_only and not cpu:
            return "it is for vLLM's CPU build"
        if in_range(version, self.versions):
            return None
        return f"it is for vLLM {self.versions}, not {version}"

    def install(self, version: str, *arounds: Around) -> bool:
        """Run `arounds` in the place of the first targets, where the version says so; returns whether it does.

        Idempotent: plugins may be loaded more than once in a process.
        """
        if (reason := self.off_because(version)) is not None:
            logger.info("rollspec: the hook %s is left out because %s", self.name, reason)
            return False
        for target, around in zip(self.targets, arounds, strict=False):
            module, _, path = target.partition(":")
            on_import(module, functools.partial(self._change, path, around))
        logger.debug("rollspec: the hook %s is in %s", self.name, self.target)
        return True

    def _change(self, path: str, around: Around, module: ModuleType) -> None:
        *holders, name = path.split(".")
        owner = functools.reduce(getattr, holders, module)
        if self.adds:
            setattr(owner, name, around)
        else:
            wrap(owner, name, around)


@dataclass(frozen=True)
class Patch(Hook):
    """A fault of vLLM's CPU build that is worked around, by the module that the patch is in."""

    cpu_only: bool = True
    arounds: tuple[Around, ...] = ()  # what runs in the place of the first targets

    def needed(self) -> bool:
        """Whether this is a CPU build."""
        from vllm.platforms import current_platform

        return bool(current_platform.is_cpu())

    def apply(self, version: str) -> bool:
        """Work around it where version and need say so; returns whether it is."""
        return self.off_because(version) is None and self.needed() and self.install(version, *self.arounds)


@dataclass(frozen=True)
class RunnerHook(Hook):
    """An attribute of one object that runs (a model runner, its drafter, its sampler, a worker, a model, a module).

    The modules in `by` change it once the object exists.
    """

    by: tuple[str, ...] = ("install",)
    attribute: str = ""  # what it is called on the object, where it is not called as the target

    def put(self, owner: Any, value: Any, by: str) -> Any:
        """Set the attribute on `owner` and return what was there (None where nothing was).

        Args:
            by: `__name__` of the module that calls. Modules come in the order of the attribute `by`.

        Raises:
            RuntimeError: a module that should wrap first comes after one that should wrap it.
        """
        order, at = vars(owner).setdefault(f"{MARK}_order", {}), self.by.index(by.rpartition(".")[2])
        if at < order.get(self.name, 0):
            raise RuntimeError(f"rollspec: {self.name} is wrapped by {by} too late; the order is {', '.join(self.by)}.")
        order[self.name] = at
        return self._set(owner, value)

    def wrap(self, owner: Any, around: Around, by: str) -> None:
        """Run `around(original, *args, **kwargs)` in the place of the method. As `put`."""
        self.put(owner, functools.partial(around, getattr(owner, self._attribute)), by)

    @contextlib.contextmanager
    def during(self, owner: Any, value: Any) -> Iterator[None]:
        """The attribute is `value` inside the block, and what it was after it."""
        before = self._set(owner, value)
        try:
            yield
        finally:
            self._set(owner, before)

    def exchange(self, one: Any, other: Any) -> None:
        """Each of two objects gets what the other one has."""
        self._set(one, self._set(other, getattr(one, self._attribute)))

    @property
    def _attribute(self) -> str:
        return self.attribute or self.target.partition(":")[2].rpartition(".")[2]

    def _set(self, owner: Any, value: Any) -> Any:
        before = getattr(owner, self._attribute, None)
        setattr(owner, self._attribute, value)
        return before


def wrap(owner: Any, name: str, around: Around) -> None:
    """Run `around(original, *args, **kwargs)` in the place of a function or property of a class or module, once.

    A coroutine function is one afterwards, too: some callers look.
    """
    found = getattr(owner, name)
    original: Any = found.fget if isinstance(found, property) else found
    if name in vars(owner) and getattr(original, MARK, False):  # not one that a parent class has
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    @functools.wraps(original)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        return await around(original, *args, **kwargs)

    put: Any = awaited if inspect.iscoroutinefunction(original) else wrapped
    put.__dict__[MARK] = True
    setattr(owner, name, property(put) if isinstance(found, property) else put)


def wrap_all(owner: Any, what: str, arounds: Mapping[str, Around], without: str, needs: Sequence[str] = ()) -> bool:
    """`wrap` methods of a trainer's class, all or none; whether it has them all, and what it `needs` besides.

    `what`: the class, `without`: what follows where a method is not there, both for the log.
    """
    absent = [name for name in (*arounds, *needs) if not hasattr(owner, name)]
    if absent:
        logger.error("rollspec: %s has no %s here, so %s.", what, ", ".join(absent), without)
        return False
    for name, around in arounds.items():
        wrap(owner, name, around)
    return True


def keep(owner: Any, name: str, value: Any) -> None:
    """Leave something of ours on an object of vLLM's, under a name that vLLM does not use."""
    if not name.startswith(MARK):
        raise ValueError(f"rollspec: {name!r} could be a name of vLLM's; begin it with {MARK!r}.")
    vars(owner)[name] = value


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
