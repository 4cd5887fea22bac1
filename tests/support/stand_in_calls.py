"""Whether a test's function can stand in for a real one: every call that it takes, the real one takes, too."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any

POSITIONAL = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD


def differs(
    stand_in: Callable[..., Any], real: ast.FunctionDef | ast.AsyncFunctionDef, is_method: bool, bound: bool
) -> str | None:
    """How the parameters differ; None where the stand-in's are among the real one's, and none that it needs is missing.

    `*args` and `**kwargs` take what they can; a name that begins with an underscore stands for any, by position.

    Args:
        stand_in: what the test has.
        real: the definition that it plays.
        is_method: the stand-in is not bound yet, so its first parameter is the object.
        bound: the real one's first parameter is the object.
    """
    given = list(inspect.signature(stand_in).parameters.values())[is_method:]
    kinds = {p.kind for p in given}
    by_position = [p for p in given if p.kind in POSITIONAL]
    by_name = {p.name for p in given if p.kind is inspect.Parameter.KEYWORD_ONLY}

    a = real.args
    every = [x.arg for x in (*a.posonlyargs, *a.args)]
    needed = every[bound : len(every) - len(a.defaults)]
    positions = every[bound:]
    named = {x.arg for x in a.kwonlyargs}
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds
    filled = positions if inspect.Parameter.VAR_POSITIONAL in kinds else positions[: len(by_position)]
    needed += [x.arg for x, default in zip(a.kwonlyargs, a.kw_defaults, strict=True) if default is None]
    for name in needed:
        if not (takes_any or name in filled or name in by_name or name in {p.name for p in by_position}):
            return f"needs {name!r}, which the stand-in does not take"
    for i, p in enumerate(by_position):
        if i < len(positions):
            if p.name != positions[i] and not p.name.startswith("_") and p.kind is not p.POSITIONAL_ONLY:
                return f"has {positions[i]!r} where the stand-in has {p.name!r}"
        elif not a.vararg and not a.kwarg and p.name not in named:
            return f"takes no {p.name!r}, as the stand-in does"
    for name in by_name:
        if name not in positions and name not in named and not a.kwarg:
            return f"takes no {name!r}, as the stand-in does"
    return None
