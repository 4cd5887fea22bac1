"""A hook: one target of vLLM that rollspec wraps, replaces or adds to, with versions, reason and removal condition.

A hook owns the assignment and nothing else; what runs in its place belongs to the module that gives it. Two kinds:

    SomeHook.apply(around)            # functions of vLLM's modules and classes, in every process that imports them;
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
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar

from rollspec.engine.vllm.compat import TESTED
from rollspec.tested import in_range

logger = logging.getLogger("rollspec.hooks")

Around = Callable[..., Any]

MARK = "_rollspec"
"""On what rollspec put in the place of a function; our notes on vLLM's objects begin with it too."""

ANY = ">=0"
"""Of hooks that every version gets: those that say why an engine is left alone."""


class Hook:
    """One change to vLLM, applied where vLLM's module is, or will be, imported.

    Class attributes: `name`; `targets`, "module:Class.function" each, the first one being what the hook is about;
    `versions`, a PEP 440 specifier of the vLLM versions it was run with;
    `why`; `removal`, the condition under which the class is deleted; `by`, the modules of rollspec that give what runs
    instead, innermost first; `correctness`, whether outputs would be wrong without it in an engine that uses it;
    `cpu_only`, whether it is for vLLM's CPU build alone.
    """

    name: ClassVar[str]
    targets: ClassVar[tuple[str, ...]]
    why: ClassVar[str]
    removal: ClassVar[str]
    versions: ClassVar[str] = TESTED
    by: ClassVar[tuple[str, ...]] = ()
    correctness: ClassVar[bool] = False
    cpu_only: ClassVar[bool] = False

    @classmethod
    def off_because(cls, version: str, cpu: bool = True) -> str | None:
        """Why this hook is left out with vLLM `version` (`cpu`: built for CPU), as a part of a sentence; else None."""
        if cls.cpu_only and not cpu:
            return "it is for vLLM's CPU build"
        if in_range(version, cls.versions):
            return None
        return f"it is for vLLM {cls.versions}, not {version}"

    @classmethod
    def needed(cls) -> bool:
        """Whether there is anything to do here. May import vLLM's module; must not change anything."""
        return True

    @classmethod
    def apply(cls, around: Around | None = None) -> None:
        """Make the change. Idempotent: plugins may be loaded more than once in a process."""
        if around is None:
            raise TypeError(f"rollspec: the hook {cls.name} needs what runs in the place of {cls.targets[0]}")
        module, _, path = cls.targets[0].partition(":")
        on_import(module, lambda found: cls.change(*owner_of(found, path), around))

    @classmethod
    def change(cls, owner: Any, name: str, around: Around) -> None:
        """Put `around` in the place of `owner.name`."""
        wrap(owner, name, around)

    @classmethod
    def install(cls, version: str, around: Around | None = None) -> bool:
        """Apply where version and need say so; returns whether it was applied."""
        if (reason := cls.off_because(version)) is not None:
            logger.info("rollspec: the hook %s is left out because %s", cls.name, reason)
            return False
        if not cls.needed():
            return False
        cls.apply() if around is None else cls.apply(around)
        logger.debug("rollspec: the hook %s is in %s", cls.name, cls.targets[0])
        return True


class Patch(Hook):
    """A fault of vLLM that is worked around; `apply` needs nothing. Left out where its own check finds no fault."""


class CpuPatch(Patch):
    """A fault of vLLM's CPU build, in every version of the range."""

    cpu_only = True

    @classmethod
    def needed(cls) -> bool:
        """Whether this is a CPU build."""
        from vllm.platforms import current_platform

        return bool(current_platform.is_cpu())


class RunnerHook(Hook):
    """An attribute of one object that runs (a model runner, its drafter, its sampler, a worker, a model, a module).

    `put` is called by the modules in `by` once the object exists.
    """

    @classmethod
    def put(cls, owner: Any, value: Any, by: str) -> Any:
        """Set the attribute on `owner` and return what was there (None where nothing was).

        Args:
            by: `__name__` of the module that calls. Modules come in the order of the class attribute `by`.

        Raises:
            RuntimeError: a module that should wrap first comes after one that should wrap it.
        """
        order, at = vars(owner).setdefault(f"{MARK}_order", {}), cls.by.index(by.rpartition(".")[2])
        if at < order.get(cls.name, 0):
            raise RuntimeError(f"rollspec: {cls.name} is wrapped by {by} too late; the order is {', '.join(cls.by)}.")
        order[cls.name] = at
        return cls._swap(owner, value)

    @classmethod
    def wrap(cls, owner: Any, around: Around, by: str) -> None:
        """Run `around(original, *args, **kwargs)` in the place of the method. As `put`."""
        original = getattr(owner, cls._attribute())
        cls.put(owner, functools.partial(around, original), by)

    @classmethod
    @contextlib.contextmanager
    def during(cls, owner: Any, value: Any) -> Iterator[None]:
        """The attribute is `value` inside the block, and what it was after it."""
        before = cls._swap(owner, value)
        try:
            yield
        finally:
            cls._swap(owner, before)

    @classmethod
    def _attribute(cls) -> str:
        """What the target is called on its owner: a running object, or a module."""
        return cls.targets[0].partition(":")[2].rpartition(".")[2]

    @classmethod
    def _swap(cls, owner: Any, value: Any) -> Any:
        name = cls._attribute()
        before = getattr(owner, name, None)
        setattr(owner, name, value)
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


def keep(owner: Any, name: str, value: Any) -> None:
    """Leave something of ours on an object of vLLM's, under a name that vLLM does not use."""
    if not name.startswith(MARK):
        raise ValueError(f"rollspec: {name!r} could be a name of vLLM's; begin it with {MARK!r}.")
    vars(owner)[name] = value


def owner_of(module: Any, path: str) -> tuple[Any, str]:
    """(what holds it, its name) of "Class.function" or "function" in a module."""
    *holders, name = path.split(".")
    return functools.reduce(getattr, holders, module), name


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
