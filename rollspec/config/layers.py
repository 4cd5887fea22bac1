"""Layers of settings become one checked configuration: nested, merged in order, refused in one sentence.

    validated(RollspecConfig, [({"proposal.k_max": 8}, "the overrides")])

A layer is a mapping and where it is from. The weakest comes first. An unknown key is an error that names the nearest
valid one: a typo must not silently leave the default in place.
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
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from knobs(kind, f"{prefix}{name}.")
        else:
            text = getattr(kind, "__name__", None) if isinstance(kind, type) else str(kind).replace("typing.", "")
            yield f"{prefix}{name}", text or str(kind), field.default, field.description or ""


def missing_knobs(section: type[BaseModel], data: Mapping[str, Any]) -> Iterator[str]:
    """Knobs of `section` that `data` does not set, by dotted name."""
    for name, *_ in knobs(section):
        value: Any = data
        for part in name.split("."):
            if not isinstance(value, Mapping) or part not in value:
                yield name
                break
            value = value[part]


def validated(section: type[M], layers: Sequence[Layer]) -> M:
    """The configuration of layers, the weakest first.

    Raises:
        ConfigError: a key is unknown, or a value out of range.
    """
    merged: dict[str, Any] = {}
    for mapping, origin in layers:
        _merge(section, merged, _expand(mapping, origin), origin)
    try:
        return section.model_validate(merged)
    except ValidationError as e:
        raise ConfigError(_sentence(e)) from e


def _expand(mapping: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """`{"a.b": 1}` and `{"a": {"b": 1}}` become the same nested dict."""
    out: dict[str, Any] = {}
    for key, value in mapping.items():
        node = out
        *parents, leaf = str(key).split(".")
        for part in parents:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise ConfigError(f"rollspec: {key!r} in {origin} is set both as a value and as a section.")
        if isinstance(value, Mapping):
            value = _expand(value, origin)
            if isinstance(node.get(leaf), dict):
                _deepen(node[leaf], value)
                continue
        node[leaf] = value
    return out


def _deepen(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    for key, value in new.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _deepen(into[key], value)
        else:
            into[key] = value


def _merge(root: type[BaseModel], into: dict[str, Any], new: Mapping[str, Any], origin: str, prefix: str = "") -> None:
    """Deep-merge `new` over `into`, refusing keys that no knob has."""
    section = _section_at(root, prefix)
    for key, value in new.items():
        if section is not None and key not in section.model_fields:
            raise ConfigError(_unknown(root, f"{prefix}{key}", value, origin))
        if isinstance(value, Mapping) and _section_at(root, f"{prefix}{key}.") is not None:
            child = into.setdefault(key, {})
            _merge(root, child, value, origin, f"{prefix}{key}.")
        else:
            into[key] = value


def _section_at(root: type[BaseModel], prefix: str) -> type[BaseModel] | None:
    section = root
    for part in prefix.split(".")[:-1]:
        field = section.model_fields.get(part)
        kind = field.annotation if field else None
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            return None
        section = kind
    return section


def _unknown(root: type[BaseModel], key: str, value: Any, origin: str) -> str:
    names = [name for name, *_ in knobs(root)]
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
