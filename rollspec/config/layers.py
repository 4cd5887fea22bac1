"""Layers of settings become one checked configuration: nested, merged in order, refused in one sentence.

    validated(RollspecConfig, [({"proposal.k_max": 8}, "the overrides")])

A layer is a mapping and where it is from. An unknown key is an error: a typo must not leave the default in place.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from rollspec.errors import ConfigError

M = TypeVar("M", bound=BaseModel)
Layer = tuple[dict[str, Any], str]


def knobs(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, Any, str]]:
    """Every knob as (dotted name, type, default, description), for documentation and for nearest-name hints."""
    for name, field in section.model_fields.items():
        kind: Any = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from knobs(kind, f"{prefix}{name}.")
        else:
            text = getattr(kind, "__name__", None) if isinstance(kind, type) else str(kind).replace("typing.", "")
            yield f"{prefix}{name}", text or str(kind), field.default, field.description or ""


def validated(section: type[M], layers: Sequence[Layer]) -> M:
    """The configuration of layers, the weakest first.

    Raises:
        ConfigError: a key is unknown, or a value out of range.
    """
    knobs_of: dict[str, Any] = {}
    for mapping, origin in layers:
        knobs_of |= flat(section, mapping, origin)
    nested: dict[str, Any] = {}
    for name, value in knobs_of.items():
        *parents, leaf = name.split(".")
        node = nested
        for part in parents:
            node = node.setdefault(part, {})
        node[leaf] = value
    try:
        return section.model_validate(nested)
    except ValidationError as e:
        raise ConfigError(_sentence(e)) from e


def flat(section: type[BaseModel], mapping: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Knobs by dotted name, from `{"a.b": 1}` as from `{"a": {"b": 1}}`.

    Raises:
        ConfigError: a key is of no knob.
    """
    known = [name for name, *_ in knobs(section)]
    out: dict[str, Any] = {}

    def take(mapping: Mapping[str, Any], prefix: str) -> None:
        for key, value in mapping.items():
            name = f"{prefix}{key}"
            if name in known:
                out[name] = value
            elif not any(knob.startswith(f"{name}.") for knob in known):
                raise ConfigError(_unknown(known, name, value, origin))
            elif not isinstance(value, Mapping):
                raise ConfigError(f"rollspec: {name} = {value!r} cannot be used: it is a section of knobs.")
            else:
                take(value, f"{name}.")

    take(mapping, "")
    return out


def _unknown(names: Sequence[str], key: str, value: Any, origin: str) -> str:
    # A user who writes only the leaf ("k_max") should still be led to the full name.
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.6) or [
        n for n in names if n.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]
    ]
    hint = f"did you mean {near[0]!r}?" if near else "run `rollspec config` for the list."
    return f"rollspec: unknown key {key!r} (value {value!r}) in {origin}; {hint}"


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(p) for p in first["loc"]) or "the configuration"
    message = first["msg"].removeprefix("Value error, ")
    value = "" if not first["loc"] else f" = {first['input']!r}"
    return f"rollspec: {where}{value} cannot be used: {message}."
